"""Where a training run stands: step, best policy so far, history; in and out of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from polyturn.training import checkpoint
from polyturn.training.candidates import Candidates
from polyturn.training.checkpoint_writer import CheckpointWriter, Snapshot
from polyturn.training.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The published policy: its version (number of rollout batches learned from) and validation score."""

    version: int
    accuracy: float
    accuracy_low: float


NOTHING_YET = Best(-1, 0.0, -1.0)


class RunState(BaseModel):
    """State of a run after `step` rollout batches; `history` holds the metrics of each.

    All randomness derives from (seed, step), so that `step` is also the data cursor, the policy's version and the
    place in the schedule. `hours` (processes x wall time) only counts against train.stop.max_gpu_hours.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    best: Best = NOTHING_YET
    history: list[Metrics] = []
    hours: float = 0.0


def start(
    checkpoints: CheckpointWriter, load: Callable[[Path], None], *, num_steps: int, resume: bool
) -> RunState:
    """The state of the newest complete checkpoint, whose weights `load` takes; a fresh one without or not to resume.

    Rank 0 looks, and all ranks take what it found (collective).

    Raises:
        CheckpointError: the checkpoint is further than the `num_steps` that the run is to have, or of another version.
    """
    world = checkpoints.world
    with world.together():
        found = checkpoint.latest(checkpoints.directory) if resume and world.is_main else None
    found = world.broadcast(found)
    if found is None:
        return RunState()
    path, content = found
    try:
        state = RunState.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise checkpoint.CheckpointError(
            f"{path} is a checkpoint of another version of polyturn ({key}: {first['msg']}); go on with that version, or "
            "set train.resume to never to start anew"
        ) from None
    if state.step > num_steps:
        raise checkpoint.CheckpointError(
            f"train.steps is {num_steps}, but the run that would go on from {path} is at step {state.step}; set "
            f"train.steps to {state.step} or more, or train.resume to never to start anew"
        )
    load(path)
    if world.is_main:
        logger.info("train: goes on from %s, after step %d", path, state.step)
    return state


def best_versions(directory: Path) -> set[int]:
    """The versions that the kept checkpoints call the best."""
    return {RunState.model_validate(state).best.version for state in checkpoint.states(directory)}


def save(
    checkpoints: CheckpointWriter,
    state: RunState,
    snapshot: Callable[[], Snapshot],
    candidates: Candidates,
) -> None:
    """Write a checkpoint in the background: `snapshot()` copies weights and optimizer state now (collective).

    Candidates that neither a kept checkpoint nor `state` calls the best are removed.
    """
    checkpoints.wait()
    if checkpoints.world.is_main:
        candidates.prune(best_versions(checkpoints.directory) | {state.best.version})
    checkpoints.submit(state.step, state.model_dump(mode="json"), snapshot())
