"""A whole training run on tiny parts, for tests of the loop."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from polyturn import grpo
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.grpo import TrainingOutcome
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import Params, PhaseParams, WarmstartParams
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.sampler.base import Sampler
from polyturn.sampler.hf import HfSampler
from polyturn.training.candidates import Candidates
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.parts import Parts, never
from polyturn.training.recorder import Recorder
from polyturn.training.run_state import Best
from polyturn.types import Problem, Trajectory
from polyturn.warmstart import ExampleSource, warm_start
from polyturn.world import ONE, World
from tests.unit import tiny

TRAIN, VALIDATION = tiny.problems(6), tiny.problems(4, "validation")


class Killed(BaseException):
    """The process was killed here."""


def as_it_is(sampler: Sampler) -> Sampler:
    """The same sampler."""
    return sampler


@dataclass
class Run:
    """A training run in a directory: its own copy of the policy, a real sampler and a real learner."""

    directory: Path
    params: Params
    policy: Policy
    sink: tiny.Metrics = field(default_factory=tiny.Metrics)
    killed_after_step: int | None = None
    stop_request: Callable[[], str | None] = never
    device: torch.device | None = None  # None: the CPU
    learner_temperature: float | None = None  # another one than that of sampling, a mistake
    world: World = ONE
    wrap_sampler: Callable[[Sampler], Sampler] = as_it_is

    def parts(self) -> Parts:
        own = tiny.copy_of(self.policy)
        torch.nn.Module.to(own.model, self.device or "cpu")
        self.checkpoints = CheckpointWriter(
            self.directory / "checkpoints", keep=2, world=self.world
        )
        renderer = Renderer(own)
        temperature = self.learner_temperature or self.params.rollout.temperature
        learner = FsdpLearner(
            own,
            renderer,
            self.params.learner,
            self.params.loss,
            temperature,
            world=self.world,
            device=self.device,
        )
        if not learner.shares_weights:  # the sampler and what is published need a plain module
            own = tiny.copy_of(self.policy)
            torch.nn.Module.to(own.model, self.device or "cpu")
        self.candidates = Candidates(own, self.directory / "candidates", self.world)
        recorder = Recorder(
            self.directory,
            self.sink,
            Progress(self.params.train.steps, "train"),
            is_main=self.world.is_main,
        )
        self.learner, self.recorder, self.own = learner, recorder, own
        if self.killed_after_step is not None:
            record = recorder.step

            def step(number: int, metrics: dict[str, float], times: dict[str, float]) -> None:
                record(number, metrics, times)
                if number == self.killed_after_step:
                    raise Killed

            recorder.step = step  # type: ignore[method-assign, assignment]
        return Parts(
            sampler=self.wrap_sampler(
                HfSampler(own, Renderer(own), is_vision_frozen=self.params.learner.freeze_vision)
            ),
            learner=learner,
            renderer=renderer,
            train=TRAIN,
            validation=VALIDATION,
            recorder=recorder,
            checkpoints=self.checkpoints,
            candidates=self.candidates,
            world=self.world,
            stop_request=self.stop_request,
        )

    def train(self, *, resume: bool = False) -> Best:
        return self.outcome(resume=resume).best

    def outcome(self, *, resume: bool = False) -> TrainingOutcome:
        self.directory.mkdir(parents=True, exist_ok=True)
        parts = self.parts()
        with self.checkpoints:
            return asyncio.run(grpo.train(parts, self.params, resume=resume))

    def published(self, best: Best) -> str:
        """Digest of the weights that lie where the best policy is said to lie."""
        path = self.candidates.path(best.version)
        return model.weights_digest(model.load(self.params.model, path).model)

    def files(self) -> dict[str, bytes]:
        """Trajectory files and pictures."""
        root = self.directory / "trajectories"
        return {
            str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
        }


@functools.cache
def taught_policy() -> Policy:
    """Taught to end its replies, so that conversations have several turns; copy it before it is trained."""
    own = tiny.qwen3()
    phase = PhaseParams(name="end", mix={"easy": 1.0}, batch_size=8, lr=5e-3, max_steps=12)
    params = WarmstartParams(examples="tests.unit.loop:short_reply", phases=(phase,))
    warm_start(
        own,
        Renderer(own),
        ExampleSource.load(params, TRAIN),
        params,
        seed=0,
        on_step=lambda _: None,
    )
    return own


def short_reply(kind: str, problem: Problem, rng: random.Random) -> Demonstration:
    """A prompt like those of training and a reply of a few letters."""
    return Demonstration(problem.messages, (Say("abcdefgh"[: rng.randint(1, 4)]),), kind)


def loop_params() -> Params:
    """Four steps of 2 x 3 trajectories of up to 3 turns, each with a new picture, and a reward that differs."""
    return tiny.params(
        reward={"terms": [{"term": "tests.unit.loop:parity"}]},
        env={"build": "tests.unit.toy_envs:build_shower"},
        rollout={"max_turns": 3, "max_new_tokens": 24},
    )


def parity(trajectory: Trajectory, problem: Problem) -> float:
    """Whether the sampled ids sum to an even number, which they do half of the time."""
    del problem
    return float(int(trajectory.token_ids[trajectory.loss_mask == 1].sum()) % 2)


def nothing(trajectory: Trajectory, problem: Problem) -> float:
    """A reward that is 0 for all."""
    del trajectory, problem
    return 0.0


class Validations:
    """Stands in for the validation, whose scores a test then knows."""

    def __init__(self, lows: Sequence[float]) -> None:
        self.lows = list(lows)

    async def __call__(self, *args: object) -> tuple[Best, dict[str, float]]:
        low = self.lows.pop(0)
        return Best(int(str(args[-1])), low + 0.1, low), {
            "eval/accuracy": low + 0.1,
            "eval/accuracy_low": low,
        }


def changed(params: Params, **train: object) -> Params:
    """The same params with other keys of the section train."""
    return params.model_copy(
        update={"train": params.train.__class__(**{**params.train.model_dump(), **train})}
    )
