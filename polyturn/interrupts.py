"""Signals that raise, such as a stage's SIGTERM, wait for the end of a call that must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HELD = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGTERM and SIGINT that come while the block runs are delivered at its end.

    Python runs handlers in the main thread alone, so that in any other there is nothing to hold back. For short calls:
    who ends this process gives it seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _HELD}
    held = {number: old for number, old in before.items() if old is not None}  # None: not Python's
    for number in held:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, old in held.items():
            signal.signal(number, old)
        for number in came:
            signal.raise_signal(number)
