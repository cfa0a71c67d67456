"""Writes checkpoints in the background, one at a time, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from polyturn.training import checkpoint
from polyturn.types import Json
from polyturn.world import ONE, RankError, World

logger = logging.getLogger(__name__)

Snapshot = Callable[[Path], None]  # writes what it holds into a directory; see Learner.snapshot
_POLL_S = 0.02


class CheckpointWriter:
    """Writes into `directory` and keeps the newest `keep`; use it as a context, whose end waits for the last write.

    Every rank submits. Each writes its own part; rank 0 waits for all parts, then makes the checkpoint count. A write
    that failed, such as by a full disk, is raised by the next `wait`, `submit` or the end of the context, and leaves
    the earlier checkpoints as they were.
    """

    def __init__(self, directory: Path, *, keep: int, world: World = ONE) -> None:
        self.directory = directory
        self.world = world
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_given_up = threading.Event()

    def submit(self, step: int, state: Mapping[str, Json], write: Snapshot) -> None:
        """Start to write the checkpoint of `step`, after the one before it is done (collective)."""
        self.wait()
        if self.world.is_main:
            checkpoint.begin(self.directory, step)
        self.world.barrier()
        work = self._write_whole if self.world.is_main else self._write_part
        self._thread = threading.Thread(
            target=self._run, args=(work, step, state, write), name=f"checkpoint of step {step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            OSError: the disk is full or unreadable; and whatever else the write failed by.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            return
        self._is_given_up.set()
        try:
            self.wait()
        except Exception as failed:  # the error that ends the run is the one to tell
            logger.warning("the last checkpoint was not written: %s", failed)

    # -- in the thread ----------------------------------------------------------------------------------------

    def _run(
        self,
        work: Callable[[int, Mapping[str, Json], Snapshot], None],
        step: int,
        state: Mapping[str, Json],
        write: Snapshot,
    ) -> None:
        try:
            work(step, state, write)
        except BaseException as error:  # raised in the training thread, which waits for it
            self._error = error

    def _write_whole(self, step: int, state: Mapping[str, Json], write: Snapshot) -> None:
        logger.debug("checkpoint of step %d: writing", step)
        partial = checkpoint.partial_path(self.directory, step)
        try:
            write(partial)
            for rank in range(1, self.world.size):
                self._await_part(partial, rank)
            checkpoint.commit(self.directory, step, state)
        except BaseException:
            checkpoint.discard(self.directory, step)
            raise
        checkpoint.prune(self.directory, self._keep, newest=step)
        logger.debug("checkpoint of step %d: written", step)

    def _write_part(self, step: int, _: Mapping[str, Json], write: Snapshot) -> None:
        partial = checkpoint.partial_path(self.directory, step)
        outcome = ""
        try:
            write(partial)
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            done = _done_path(partial, self.world.rank)
            beside = done.with_name(f"{done.name}.tmp")
            beside.write_text(outcome)
            beside.rename(done)

    def _await_part(self, partial: Path, rank: int) -> None:
        done = _done_path(partial, rank)
        while not done.exists():
            if self._is_given_up.is_set():
                raise RankError(f"rank {rank} did not finish its part of {partial}")
            time.sleep(_POLL_S)
        outcome = done.read_text()
        done.unlink()
        if outcome:
            raise RankError(f"rank {rank} could not write its part of {partial}: {outcome}")


def _done_path(partial: Path, rank: int) -> Path:
    """The file by which a rank says that its part is written (empty) or why it is not."""
    return partial / f".rank_{rank}.done"
