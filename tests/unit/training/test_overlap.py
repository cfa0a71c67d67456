"""Sampling one update ahead: which version samples what, that both really work at once, and exact resuming."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from polyturn import grpo, trajectories
from polyturn.learner.base import Logprobs
from polyturn.params import Params, ParamsError, parse
from polyturn.policy import model
from polyturn.render import Renderer
from polyturn.rollout import FailureBudgetError
from polyturn.sampler.base import Reply, Sampler, SampleRequest
from polyturn.sampler.hf import HfSampler
from polyturn.training.checkpoint import CheckpointError
from polyturn.training.overlap import BATCH_FILE, Rollouts
from polyturn.training.parts import Parts
from polyturn.types import TrainingSample
from polyturn.world import World
from tests.unit import ranks, tiny
from tests.unit.loop import Killed, Run, changed, loop_params, taught_policy

PATIENCE_S = 20.0
AHEAD: dict[str, object] = {"async_steps": 1, "updates_per_rollout": 1}


def ahead(**train: object) -> Params:
    """The loop's params with sampling one update ahead, on-policy but for that."""
    params = loop_params()
    loss = params.loss.model_copy(update={"tis_mode": "token_truncate"})
    return changed(params.model_copy(update={"loss": loss}), **{**AHEAD, **train})


def versions(run: Run) -> list[set[int]]:
    """The policy versions in each step's trajectory file."""
    directory = run.directory / "trajectories"
    return [
        {record["policy_version"] for record in trajectories.read_step(directory, step)}
        for step in trajectories.list_steps(directory)
    ]


@pytest.mark.parametrize("async_steps", [0, 1])
def test_batch_t_plus_1_is_sampled_wholly_from_version_t(tmp_path: Path, async_steps: int) -> None:
    run = Run(tmp_path, ahead(async_steps=async_steps), taught_policy())
    run.train()
    behind = [step - version for step, (version,) in enumerate(versions(run))]
    assert behind == ([0, 1, 1, 1] if async_steps else [0, 0, 0, 0])
    told = [metrics.get("train/staleness") for metrics in run.recorder.history[:4]]
    assert told == ([0.0, 1.0, 1.0, 1.0] if async_steps else [None] * 4)


def test_the_batch_ahead_is_the_one_that_the_version_before_samples(tmp_path: Path) -> None:
    """Batches 0 and 1 come from version 0: those of a run whose weights never change."""
    run = Run(tmp_path / "ahead", ahead(), taught_policy())
    run.train()
    still = changed(ahead(async_steps=0), debug={"mode": "rollout_only"})
    other = Run(tmp_path / "still", still, taught_policy())
    other.train()
    files, same = run.files(), other.files()
    assert [
        files[f"step_00000{n}.jsonl.gz"] == same[f"step_00000{n}.jsonl.gz"] for n in range(4)
    ] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("killed_after_step", [2, 3])
def test_a_resumed_run_has_the_bytes_of_one_never_stopped(
    tmp_path: Path, killed_after_step: int
) -> None:
    """The checkpoint holds the batch that was sampled by a policy which is no longer there."""
    whole = Run(tmp_path / "whole", ahead(), taught_policy())
    best = whole.train()
    stopped = Run(
        tmp_path / "stopped", ahead(), taught_policy(), killed_after_step=killed_after_step
    )
    with pytest.raises(Killed):
        stopped.train()
    resumed = Run(tmp_path / "stopped", ahead(), tiny.qwen3(seed=5))
    assert resumed.train(resume=True) == best
    assert model.weights_digest(resumed.own.model) == model.weights_digest(whole.own.model)
    assert resumed.recorder.history == whole.recorder.history
    assert resumed.files() == whole.files()


def test_more_steps_go_on_as_if_they_had_been_wanted_from_the_start(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", ahead(steps=6), taught_policy())
    whole.train()
    short = Run(tmp_path / "short", ahead(steps=4), taught_policy())
    short.train()
    longer = Run(tmp_path / "short", ahead(steps=6), taught_policy())
    longer.train(resume=True)
    assert model.weights_digest(longer.own.model) == model.weights_digest(whole.own.model)
    assert longer.files() == whole.files()


def test_a_batch_is_kept_in_a_checkpoint_only_where_it_was_sampled_ahead(tmp_path: Path) -> None:
    for async_steps in (0, 1):
        run = Run(tmp_path / str(async_steps), ahead(async_steps=async_steps), taught_policy())
        run.train()
        for step in (2, 4):
            path = run.directory / "checkpoints" / f"step_00000{step}" / BATCH_FILE
            assert path.exists() == bool(async_steps)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_a_batch_that_other_code_wrote_is_named(tmp_path: Path, content: bytes) -> None:
    run = Run(tmp_path / "run", ahead(), taught_policy())
    rollouts = Rollouts(run.parts(), run.params)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    rollouts.snapshot()(directory)
    (directory / BATCH_FILE).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"next_batch.pickle, the batch .* train.resume to never"
    ):
        rollouts.load(directory)


# -- at the same time ---------------------------------------------------------------------------------------------


@dataclass
class Beside:
    """A sampler with weights of its own; in another thread than the loop's it waits until the learner works."""

    inner: Sampler
    is_lockstep: bool = False
    learning: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    in_flight: int = 0

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        self.in_flight += 1
        if threading.current_thread() is not threading.main_thread():
            assert await asyncio.to_thread(self.learning.wait, PATIENCE_S), "nothing overlaps"
            self.answered.set()
        replies = await self.inner.generate(requests)
        self.in_flight -= 1
        return replies

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        assert self.in_flight == 0, "weights change under a batch"
        self.learning.clear()
        self.answered.clear()
        self.inner.update_weights(tensors, version)

    def rest(self) -> None:
        pass

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def beside(directory: Path, params: Params) -> tuple[Run, Parts, Beside]:
    """A run whose sampler has a copy of the policy, and its parts."""
    own = tiny.copy_of(taught_policy())
    sampler = Beside(HfSampler(own, Renderer(own)))
    run = Run(directory, params, taught_policy(), wrap_sampler=lambda _: sampler)
    return run, run.parts(), sampler


def test_a_batch_is_sampled_while_the_learner_works(tmp_path: Path) -> None:
    """Replies come only once the learner works, and it goes on only once there are some."""
    run, parts, sampler = beside(tmp_path, ahead())
    compare = run.learner.logprobs

    def watched(samples: Sequence[TrainingSample]) -> list[Logprobs]:
        sampler.learning.set()
        assert sampler.answered.wait(PATIENCE_S), "nothing overlaps"
        return compare(samples)

    run.learner.logprobs = watched  # type: ignore[method-assign]
    with run.checkpoints:
        asyncio.run(grpo.train(parts, run.params, resume=False))
    assert versions(run) == [{0}, {0}, {1}, {2}]
    told = [metrics for _, metrics in run.sink.steps[:4]]
    assert all(metrics["perf/train_wait_time"] is not None for metrics in told)


def test_an_update_that_fails_ends_the_run_without_waiting_for_the_batch(tmp_path: Path) -> None:
    run, parts, sampler = beside(tmp_path, ahead())

    def broken(samples: Sequence[TrainingSample]) -> list[Logprobs]:
        raise RuntimeError("the learner broke")

    run.learner.logprobs = broken  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the learner broke"), run.checkpoints:
        asyncio.run(grpo.train(parts, run.params, resume=False))
    assert time.monotonic() - started < PATIENCE_S / 2
    sampler.learning.set()  # lets the thread go


def test_a_batch_that_fails_ends_the_run(tmp_path: Path) -> None:
    """What the sampling thread raises is raised by the loop, with the next step's number in its message."""
    run, parts, sampler = beside(tmp_path, ahead())
    compare, generate = run.learner.logprobs, sampler.generate

    async def failing(requests: Sequence[SampleRequest]) -> list[Reply]:
        replies = await generate(requests)
        if threading.current_thread() is threading.main_thread():
            return replies
        return [replace(reply, prompt_length=-1) for reply in replies]

    def watched(samples: Sequence[TrainingSample]) -> list[Logprobs]:
        sampler.learning.set()
        return compare(samples)

    sampler.generate = failing  # type: ignore[method-assign]
    run.learner.logprobs = watched  # type: ignore[method-assign]
    with pytest.raises(FailureBudgetError, match="-1"), run.checkpoints:
        asyncio.run(grpo.train(parts, run.params, resume=False))


# -- several ranks ------------------------------------------------------------------------------------------------


def trained_on_ranks(world: World) -> tuple[list[set[int]], float]:
    """Versions of a run's batches, and the last step's reward (called on every rank)."""
    directory = Path(os.environ["OVERLAP_DIRECTORY"])
    run = Run(directory, ahead(), taught_policy(), world=world)
    if os.environ["OVERLAP_BESIDE"] == "yes":
        own = tiny.copy_of(taught_policy())
        sampler = Beside(HfSampler(own, Renderer(own)))
        sampler.learning.wait = lambda timeout=None: True  # type: ignore[method-assign]
        run.wrap_sampler = lambda _: sampler
    run.train()
    return versions(run), run.recorder.history[3]["rollout/raw_reward"]


@pytest.mark.parametrize("at_once", ["yes", pytest.param("no", marks=pytest.mark.full)])
def test_two_ranks_sample_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: str
) -> None:
    """What ranks exchange while sampling does not meet what they exchange while training."""
    monkeypatch.setenv("OVERLAP_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setenv("OVERLAP_BESIDE", at_once)
    outcomes = [
        rank.outcome
        for rank in ranks.run("tests.unit.training.test_overlap:trained_on_ranks", tmp_path)
    ]
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], tuple), outcomes[0]
    assert outcomes[0][0] == [{0}, {0}, {1}, {2}]


# -- what cannot work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"loss": {"tis_mode": "none"}}, "loss.tis_mode to token_truncate"),
        ({"learner": {"offload": True}}, "learner.offload: true makes .* take turns"),
        (
            {"sampler": {"sglang": {"release_memory": True}}},
            "sampler.sglang.release_memory: true makes",
        ),
        ({"train": {**AHEAD, "debug": {"mode": "rollout_only"}}}, "nothing overlaps"),
        ({"train": {"async_steps": 2}}, "train.async_steps"),
    ],
)
def test_what_does_not_go_with_sampling_ahead_is_refused(
    tree: dict[str, dict[str, object]], message: str
) -> None:
    base: dict[str, dict[str, object]] = {
        "train": AHEAD,
        "loss": {"tis_mode": "token_mask"},
    }
    with pytest.raises(ParamsError, match=message):
        parse({**base, **tree})
    parse(base)


def test_several_updates_against_the_samplers_logprobs_are_correction_enough() -> None:
    parse({"train": {"async_steps": 1, "updates_per_rollout": 2}})
