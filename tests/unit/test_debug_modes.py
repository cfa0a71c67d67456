"""One half of the loop alone, and a step's batch as a file."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyturn import grpo, trajectories
from polyturn.learner.base import UpdateStats
from polyturn.params import Params, ParamsError, parse
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.types import TrainingSample
from tests.unit.loop import (
    Run,
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


def test_training_on_saved_rollouts_gives_the_bytes_of_the_run_that_sampled_them(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "whole", params, policy)
    whole.train()
    saved = tmp_path / "whole" / "trajectories"
    alone = Run(
        tmp_path / "alone",
        changed(params, debug={"mode": "train_only", "rollouts": str(saved)}),
        policy,
    )
    outcome = alone.outcome()
    assert model.weights_digest(alone.own.model) == model.weights_digest(whole.own.model)
    assert outcome.best.version == 4
    assert alone.published(outcome.best) == model.weights_digest(whole.own.model)
    assert alone.files() == whole.files()
    for own, sampled in zip(alone.recorder.history, whole.recorder.history, strict=True):
        assert own == {name: v for name, v in sampled.items() if not name.startswith("eval/")}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("step", r"has no step_000004.jsonl.gz \(steps there: 0 to 3\); lower train.steps"),
        ("empty", r"has no step_000000.jsonl.gz \(steps there: none\)"),
        ("problem", r"problems that this run does not train on \(other, 1 in all\)"),
        ("picture", r"png is missing, a picture that the environment made for problem train-"),
    ],
)
def test_saved_rollouts_that_do_not_fit_are_named(
    policy: Policy, params: Params, tmp_path: Path, case: str, message: str
) -> None:
    Run(tmp_path, params, policy).train()
    directory = tmp_path / "trajectories"
    steps = changed(params, steps=1)
    if case == "step":
        steps = changed(params, steps=5)
    elif case == "empty":
        directory = tmp_path / "candidates"
    elif case == "picture":
        for picture in (directory / "png").iterdir():
            picture.unlink()
    else:
        records = trajectories.read_step(directory, 0)
        for record in records[:1]:
            record["problem_id"] = "other"
        trajectories.write_step(directory, 0, records)
    alone = Run(
        tmp_path / "alone",
        changed(steps, debug={"mode": "train_only", "rollouts": str(directory)}),
        policy,
    )
    with pytest.raises(ValueError, match=r"train\.debug\.rollouts: .*" + message):
        alone.train()
    if case in ("step", "empty"):
        assert alone.sink.steps == []  # before the first step


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "train_only"}, r"rollouts names the directory .* got mode 'train_only'"),
        ({"rollouts": "saved"}, r"rollouts names the directory .* got mode 'off'"),
        (
            {"mode": "train_only", "rollouts": "artifacts/trajectories/"},
            r".* which DVC removes before train starts; copy it",
        ),
    ],
)
def test_debug_keys_that_cannot_work_are_refused(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ParamsError, match=r"train\.debug: " + message):
        parse({"train": {"debug": keys}})


def test_rollouts_alone_leave_the_weights_as_they_are(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "whole", params, policy)
    whole.train()
    alone = Run(tmp_path / "alone", changed(params, debug={"mode": "rollout_only"}), policy)
    alone.train()
    assert model.weights_digest(alone.own.model) == model.weights_digest(policy.model)
    first = "step_000000.jsonl.gz"
    assert alone.files()[first] == whole.files()[first]
    for step, metrics in enumerate(alone.recorder.history[:4]):
        assert not any(name.startswith("train/") for name in metrics)
        records = trajectories.read_step(tmp_path / "alone" / "trajectories", step)
        assert {r["policy_version"] for r in records} == {0}


@pytest.mark.parametrize(("mode", "rests"), [("off", 4), ("rollout_only", 0)])
def test_a_sampler_rests_only_if_new_weights_wake_it(
    policy: Policy, params: Params, tmp_path: Path, mode: str, rests: int
) -> None:
    """What sampling took goes where times go: to the sink, and not into the history."""
    run = Run(tmp_path, changed(params, debug={"mode": mode}), policy)
    parts = run.parts()
    seen: list[None] = []
    parts.sampler.rest = lambda: seen.append(None)  # type: ignore[method-assign]
    parts.sampler.take_metrics = lambda: {"perf/sampler_retries": 3.0}  # type: ignore[method-assign]
    with run.checkpoints:
        asyncio.run(grpo.train(parts, run.params, resume=False))
    assert len(seen) == rests
    assert not any("perf/sampler_retries" in metrics for metrics in run.recorder.history)
    assert [m.get("perf/sampler_retries") for _, m in run.sink.steps[:4]] == [3.0] * 4


def test_a_step_s_batch_is_written_as_the_learner_gets_it(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, changed(params, debug={"dump_step": 1}), policy)
    parts = run.parts()
    learner_update = parts.learner.update
    given: list[list[TrainingSample]] = []

    def update(samples: Sequence[TrainingSample], **how: object) -> UpdateStats:
        given.append(list(samples))
        return learner_update(samples, **how)  # type: ignore[arg-type]

    parts.learner.update = update  # type: ignore[method-assign, assignment]
    with run.checkpoints:
        asyncio.run(grpo.train(parts, run.params, resume=False))
    (path,) = (tmp_path / "trajectories").glob("batch_step_*")
    assert path.name == "batch_step_000001.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    updates = int(run.recorder.history[0]["train/num_updates"])
    expected = [
        (number, sample)
        for number, part in enumerate(given[updates : updates + 2])
        for sample in part
    ]
    assert len(lines) == len(expected) > 0
    for line, (number, sample) in zip(lines, expected, strict=True):
        assert line["update"] == number
        assert line["token_ids"] == sample.token_ids.tolist()
        assert line["advantage"] == sample.advantage
        assert np.array_equal(np.asarray(line["logprobs"], dtype=np.float32), sample.logprobs)
    assert trajectories.list_steps(tmp_path / "trajectories") == [0, 1, 2, 3]
