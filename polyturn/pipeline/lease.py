"""An exclusive lease on a directory of work: one process at a time, orphans are ended and named."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from polyturn import processes
from polyturn.processes import Process

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class LeaseError(ValueError):
    """Somebody else holds the lease; the message names who, and what to do."""


@dataclass(frozen=True)
class Holder:
    """What the lease file says about its holder; `parent` is the dvc process that started it, if any."""

    pid: int
    started: int
    host: str
    parent_pid: int | None = None
    parent_started: int | None = None

    @property
    def is_orphan(self) -> bool:
        """Whether it lives on this host while the dvc that started it is gone."""
        if (
            self.host != socket.gethostname()
            or self.parent_pid is None
            or self.parent_started is None
        ):
            return False
        parent = Process(self.parent_pid, self.parent_started)
        return not parent.is_alive and Process(self.pid, self.started).is_alive


@contextmanager
def hold(path: Path, *, what: str, parent: Process | None, grace_s: float = 30.0) -> Iterator[None]:
    """Hold the lease file `path` for as long as the context lasts.

    An orphan that holds it (its `parent` has died) is sent SIGTERM, after `grace_s` SIGKILL, and waited for.

    Raises:
        LeaseError: a living process holds it; `what` names the work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _lock(file):
            _end_orphan(file, path=path, what=what, grace_s=grace_s)
        file.seek(0)
        file.truncate()
        json.dump(asdict(_myself(parent)), file)
        file.flush()
        yield
        file.truncate(0)


def _myself(parent: Process | None) -> Holder:
    me = processes.current()
    return Holder(
        pid=me.pid,
        started=me.started,
        host=socket.gethostname(),
        parent_pid=parent.pid if parent else None,
        parent_started=parent.started if parent else None,
    )


def _end_orphan(file: IO[str], *, path: Path, what: str, grace_s: float) -> None:
    holder = _read(file)
    if holder is None:
        if not _wait(file, grace_s):
            raise LeaseError(
                f"{what}: {path} is locked by a process that did not sign it; find it with `fuser {path}`"
            )
        return
    if not holder.is_orphan:
        raise LeaseError(
            f"{what} is already running as pid {holder.pid} on {holder.host}; wait until it ends, "
            f"or stop it with `kill {holder.pid}`"
        )
    logger.warning(
        "%s: pid %d is an orphan (its dvc, pid %s, has died); it is ended first",
        what, holder.pid, holder.parent_pid,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(holder.pid, number)
        if _wait(file, grace_s):
            logger.warning("%s: the orphan, pid %d, has ended", what, holder.pid)
            return
    raise LeaseError(
        f"{what}: the orphan, pid {holder.pid}, cannot be ended; a child of it may hold {path}"
    )


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(file: IO[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if _lock(file):
            return True
        time.sleep(_POLL_S)
    return False


def _read(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None
