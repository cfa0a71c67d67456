"""train.resume: RUN_ID: go on from what another run left, under other code or params."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from polyturn import layout, tracking
from polyturn.params import Params
from polyturn.pipeline import lease
from polyturn.tracking.run import attach_run
from polyturn.training import checkpoint
from tasks import training
from tasks.context import StageContext
from tasks.place import Place, snapshots_at

logger = logging.getLogger(__name__)

WORK_TAG = "train.work"  # of every training run: its work directory
_COMMIT_TAG = "mlflow.source.git.commit"


class ContinuationError(ValueError):
    """The run that train.resume names cannot be continued."""


def adopt(ctx: StageContext, place: Place) -> None:
    """Copy what run params.train.resume left into the work directory, unless that has checkpoints of its own.

    Raises:
        ContinuationError: there is no such run, or nothing is left of it.
        LeaseError: it is still running.
    """
    name, work = ctx.params.train.resume, place.directory
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
    if tags[WORK_TAG] == place.address or checkpoint.states(work / training.CHECKPOINTS):
        return
    with _left_at(tags[WORK_TAG], ctx.params) as old:
        states = checkpoint.states(old / training.CHECKPOINTS)
        if not states:
            raise ContinuationError(
                f"train.resume: nothing is left of run {name} in {tags[WORK_TAG]}; its checkpoints go when it has "
                "ended well"
            )
        _copy(old, work, num_steps=int(str(states[-1]["step"])))
    logger.warning(
        "train.resume: goes on from run %s of commit %s, which had other code, data or params; the result is of neither",
        *(name, commit[:12]),
    )


@contextmanager
def _left_at(address: str, params: Params) -> Iterator[Path]:
    """A directory with what a run left at its address, leased while it is on this disk."""
    if address.startswith("s3://"):
        with TemporaryDirectory(dir=layout.STATE) as directory:
            fetched = Path(directory) / "work"
            snapshots_at(address, params).pull(fetched)
            yield fetched
        return
    old = Path(address)
    with lease.hold(old.with_suffix(".lock"), what=f"training run {old.name}", parent=None):
        yield old


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
