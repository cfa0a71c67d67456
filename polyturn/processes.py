"""Which process is which (Linux /proc): identity that survives reuse of ids, ancestors, dying together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


@dataclass(frozen=True)
class Process:
    """One process; `started` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


def parse(text: str) -> Process:
    """Read what `str(process)` wrote.

    Raises:
        ValueError: it is not `PID:STARTED`.
    """
    pid, _, started = text.partition(":")
    return Process(int(pid), int(started))


def find(pid: int) -> Process | None:
    """The living process with this id, or None."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def current() -> Process:
    """This process."""
    process = find(os.getpid())
    assert process is not None
    return process


def dvc_parent(stage: str) -> Process | None:
    """The dvc process that runs this stage: the nearest ancestor that was not itself given DVC_STAGE.

    A shell may stand in between. None where the stage was started by hand.
    """
    mark = f"DVC_STAGE={stage}".encode()
    if os.environ.get("DVC_STAGE") != stage:
        return None
    for pid in ancestors():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if mark not in variables:
            return find(pid)
    return None


def die_with(
    process: Process,
    *,
    name: str,
    grace_s: float = 20.0,
    last: Callable[[], object] = lambda: None,
) -> None:
    """End this process (SIGTERM, then SIGKILL after `grace_s`) when `process`, called `name`, is gone.

    `last` is called before the SIGKILL.
    """
    if os.getppid() == process.pid:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(process, name, grace_s, last), daemon=True).start()


def _watch(process: Process, name: str, grace_s: float, last: Callable[[], object]) -> None:
    while process.is_alive:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    logger.error("%s (pid %d) has died, so this stage ends too", name, process.pid)
    time.sleep(grace_s)
    last()
    os.kill(os.getpid(), signal.SIGKILL)


def ancestors() -> Iterator[int]:
    """The ids of this process's parent, its parent, and so on."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (0: state, 1: parent, 19: start time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def group_is_alive(group: int) -> bool:
    """Whether a process of this process group still runs."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False
