"""Keeps a training run's newest checkpoint, and what it needs beside itself, in a store of objects while the run goes on.

It looks at the files alone, so that the loop and its ranks know nothing of it: training never waits for the store.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from pathlib import Path
from types import TracebackType

from polyturn import trajectories, trajectory_times
from polyturn.objects import ObjectsError
from polyturn.pipeline.lease import LeaseError
from polyturn.pipeline.object_lease import ObjectLease
from polyturn.training import checkpoint
from polyturn.training.candidates import version_path
from polyturn.training.recorder import PICTURES, TRAJECTORIES
from polyturn.training.run_state import RunState
from polyturn.training.snapshots import Snapshots
from tasks.training import CANDIDATES, CHECKPOINTS, JOURNAL

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_STAGED = ".mirror"


class Mirror:
    """Pushes snapshots of `work` while its context lasts; `lease` says whether it still may.

    A push that fails for want of a connection is a warning; the next one brings what it lacked.
    """

    def __init__(self, work: Path, snapshots: Snapshots, lease: ObjectLease) -> None:
        self._work = work
        self._snapshots = snapshots
        self._lease = lease
        self._pushed = snapshots.latest()
        self._is_behind = False
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._push_until_ended, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error the newest checkpoint is pushed, so that another worker may go on from it.

        Raises:
            LeaseError: somebody else has taken the lease, which is why the run ended.
        """
        self._is_ended.set()
        self._thread.join()
        if loss := self._lease.loss:
            raise loss from None
        if error is not None:
            self._push()

    def _push_until_ended(self) -> None:
        while not self._is_ended.wait(_POLL_S):
            self._push()

    def _push(self) -> None:
        staged = self._work / _STAGED
        try:
            step = _stage(self._work, staged, newer_than=self._pushed)
            if step is None or self._lease.loss:
                return
            self._lease.check()
            self._snapshots.push(step, staged, known=_known_digests(staged))
            self._pushed, self._is_behind = step, False
            logger.debug("checkpoint of step %d: in %s", step, self._snapshots.objects.address)
        except LeaseError as lost:  # told when the context ends
            logger.debug("%s", lost)
        except (OSError, ObjectsError) as failed:
            if not self._is_behind:  # once, not at every attempt
                logger.warning(
                    "the newest checkpoint is not in the store of train.work_uri yet: %s", failed
                )
            self._is_behind = True
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def newest_step(work: Path) -> int | None:
    """The step of the newest complete checkpoint in a work directory, by its name alone."""
    paths = (work / CHECKPOINTS).glob(f"step_*/{checkpoint.MARKER}")
    steps = [int(path.parent.name.removeprefix("step_")) for path in paths
             if path.parent.name.removeprefix("step_").isdigit()]  # fmt: skip
    return max(steps, default=None)


def _stage(work: Path, target: Path, *, newer_than: int | None) -> int | None:
    """Link the newest checkpoint with what a run needs to go on from it; None if it is not newer.

    Links outlive the pruning of the originals, which go on meanwhile.
    """
    step = newest_step(work)
    if step is None or (newer_than is not None and step <= newer_than):
        return None
    shutil.rmtree(target, ignore_errors=True)
    name = Path(CHECKPOINTS) / f"step_{step:06d}"
    try:
        _link_tree(work / name, target / name)
        marker = json.loads((target / name / checkpoint.MARKER).read_text())
        best = RunState.model_validate(marker["state"]).best.version
        if best >= 0:
            _link_tree(
                version_path(work / CANDIDATES, best), version_path(target / CANDIDATES, best)
            )
    except (FileNotFoundError, shutil.Error):  # pruned at this moment: there is a newer one
        return None
    for path in _of_steps(work, step):
        _link(path, target / path.relative_to(work))
    lines = (work / JOURNAL).read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
    (target / JOURNAL).write_text("".join(kept))
    return step


def _of_steps(work: Path, step: int) -> list[Path]:
    """The files of trajectories before `step`, with their times and all pictures."""
    directory = work / TRAJECTORIES
    steps = [done for done in trajectories.list_steps(directory) if done < step]
    times = [trajectory_times.times_path(directory, done) for done in steps]
    return [
        *(trajectories.step_path(directory, done) for done in steps),
        *(path for path in times if path.is_file()),
        *sorted((directory / PICTURES).glob("*.png")),
    ]


def _link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def _known_digests(staged: Path) -> dict[Path, str]:
    """The digests that the checkpoint's marker already has."""
    (marker,) = (staged / CHECKPOINTS).glob(f"step_*/{checkpoint.MARKER}")
    files = json.loads(marker.read_text())["files"]
    return {marker.parent.relative_to(staged) / name: digest for name, digest in files.items()}
