"""train.resume: RUN_ID: go on from what another run left, under other code or params."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from polyturn import checkpoint, lease, tracking
from polyturn.tracking.run import attach_run
from tasks import training
from tasks.context import StageContext

logger = logging.getLogger(__name__)

WORK_TAG = "train.work"  # of every training run: its work directory
_COMMIT_TAG = "mlflow.source.git.commit"


class ContinuationError(ValueError):
    """The run that train.resume names cannot be continued."""


def adopt(ctx: StageContext, work: Path) -> None:
    """Copy what run params.train.resume left into the work directory, unless that has checkpoints of its own.

    Raises:
        ContinuationError: there is no such run, or nothing is left of it.
        LeaseError: it is still running.
    """
    name = ctx.params.train.resume
    try:
        tags = attach_run(ctx.params.tracking, root=Path.cwd(), run_id=name).tags()
    except tracking.TrackingError as error:
        raise ContinuationError(
            f"train.resume must be auto, never or a run's id: {error}"
        ) from None
    if WORK_TAG not in tags:
        raise ContinuationError(f"train.resume: run {name} is none of stage train")
    commit = tags.get(_COMMIT_TAG, "unknown")
    ctx.run.set_tags({"resumed_from_run": name, "resumed_from_commit": commit})
    old = Path(tags[WORK_TAG])
    if old == work.absolute() or checkpoint.states(work / training.CHECKPOINTS):
        return
    with lease.hold(old.with_suffix(".lock"), what=f"training run {old.name}", parent=None):
        states = checkpoint.states(old / training.CHECKPOINTS)
        if not states:
            raise ContinuationError(
                f"train.resume: nothing is left of run {name} in {old}; its checkpoints go when it has ended well"
            )
        _copy(old, work, num_steps=int(str(states[-1]["step"])))
    logger.warning(
        "train.resume: goes on from run %s of commit %s, which had other code, data or params; the result is of neither",
        *(name, commit[:12]),
    )


def _copy(old: Path, work: Path, *, num_steps: int) -> None:
    """Checkpoints come last, so that a copy that is cut short is made again."""
    for directory in training.RESUMED:
        if (old / directory).is_dir():
            shutil.copytree(old / directory, work / directory, dirs_exist_ok=True)
    lines = (old / training.JOURNAL).read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < num_steps]
    (work / training.JOURNAL).write_text("".join(kept))
    partial = work / f".{training.CHECKPOINTS}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(old / training.CHECKPOINTS, partial)
    shutil.rmtree(work / training.CHECKPOINTS, ignore_errors=True)
    partial.rename(work / training.CHECKPOINTS)
