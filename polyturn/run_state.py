"""Where a training run stands: step, best policy so far, history; in and out of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from polyturn import checkpoint
from polyturn.metrics import Metrics


@dataclass(frozen=True)
class Best:
    """The published policy: its version (number of rollout batches learned from) and validation score."""

    version: int
    accuracy: float
    accuracy_low: float


NOTHING_YET = Best(-1, 0.0, -1.0)


class RunState(BaseModel):
    """State of a run after `step` rollout batches; `history` holds the metrics of each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    best: Best = NOTHING_YET
    history: list[Metrics] = []


def start(directory: Path, load: Callable[[Path], None], num_steps: int, resume: bool) -> RunState:
    """The state of the newest complete checkpoint, whose weights `load` takes; a fresh one without or not to resume.

    Raises:
        CheckpointError: the checkpoint is further than the `num_steps` that the run is to have.
    """
    found = checkpoint.latest(directory) if resume else None
    if found is None:
        return RunState()
    path, content = found
    state = RunState.model_validate(content)
    if state.step > num_steps:
        raise checkpoint.CheckpointError(
            f"train.steps is {num_steps}, but the run that would go on from {path} is at step {state.step}; set "
            f"train.steps to {state.step} or more, or train.resume to never to start anew"
        )
    load(path)
    return state


def best_versions(directory: Path) -> set[int]:
    """The versions that the kept checkpoints call the best."""
    return {RunState.model_validate(state).best.version for state in checkpoint.states(directory)}


def save(directory: Path, state: RunState, write: Callable[[Path], None]) -> None:
    """Write a checkpoint; `write` puts weights and optimizer state into it."""
    content = {"step": state.step, "best": asdict(state.best), "history": state.history}
    checkpoint.save(directory, state.step, content, write)
