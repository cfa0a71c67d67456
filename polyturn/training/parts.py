"""What a training run is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyturn.learner.base import Learner
from polyturn.render import Renderer
from polyturn.sampler.base import Sampler
from polyturn.training.candidates import Candidates
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.recorder import Recorder
from polyturn.types import Problem
from polyturn.world import ONE, World


def never() -> None:
    """Nobody asks the run to stop."""


@dataclass(frozen=True)
class Parts:
    """The pieces of a training run; `stop_request` gives the reason why somebody wants it to end, or None."""

    sampler: Sampler
    learner: Learner
    renderer: Renderer
    train: Sequence[Problem]
    validation: Sequence[Problem]
    recorder: Recorder
    checkpoints: CheckpointWriter
    candidates: Candidates
    world: World = ONE
    stop_request: Callable[[], str | None] = never
