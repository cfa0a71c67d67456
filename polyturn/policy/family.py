"""The processes that a stage has started, wherever they have gone: found by a mark in their environment, ended together.

Children inherit the mark over sessions, process groups and dead parents, which neither a group nor a parent id survives.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from polyturn import processes
from polyturn.processes import Process

MARK = "POLYTURN_FAMILY"
_KILL_S = 3.0


def new_mark() -> str:
    """A mark that no other family has; it goes into the environment as MARK."""
    return uuid.uuid4().hex


def join() -> str:
    """The mark of this process, which heads a family of its own if it was given none."""
    return os.environ.setdefault(MARK, new_mark())


def members(mark: str) -> list[Process]:
    """The living processes that were started with the mark, this one and those above it apart."""
    entry = f"{MARK}={mark}".encode()
    above = {os.getpid(), *processes.ancestors()}
    found: list[Process] = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) in above:
            continue
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        process = processes.find(int(directory.name)) if entry in variables else None
        if process is not None and process.is_alive:
            found.append(process)
    return found


def end(mark: str, *, grace_s: float) -> Sequence[Process]:
    """Send the members SIGTERM, after `grace_s` SIGKILL, and wait for them; return those that there were.

    What SIGKILL does not end within a few seconds (a process that waits for a dead disk) is left to the system.
    """
    first = members(mark)
    _signal(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (alive := members(mark)) and time.monotonic() < deadline + _KILL_S:
        if (
            time.monotonic() >= deadline
        ):  # again and again: one that is being ended may start another
            _signal(alive, signal.SIGKILL)
        time.sleep(0.1)
    return first


def _signal(family: Sequence[Process], number: int) -> None:
    for process in family:
        if process.is_alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
