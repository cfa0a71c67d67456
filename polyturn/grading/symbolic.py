"""Symbolic comparison by math-verify in child processes that are killed at a time limit.

Works the same from any thread: neither signals nor forks of this process are used. A killed or crashed child is
replaced at once, so the pool stays healthy; starting it (about a second of imports) is not part of the limit.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

NUM_WORKERS = 2
START_LIMIT_S = 120.0  # of importing sympy on a busy machine

_WORKER = Path(__file__).with_name("worker.py")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """Whether two expressions are equal; `failure` says why that could not be found out."""

    match: bool
    failure: str | None = None


class _Worker:
    """One child process; owned by one thread at a time."""

    def __init__(self) -> None:
        # -P keeps this directory out of the child's sys.path: numbers.py would hide the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._buffer = b""
        self._is_ready = False

    def ask(self, prediction: str, reference: str, limit_s: float) -> Comparison | None:
        """The child's answer; None when it did not come within the limit.

        Raises:
            OSError: the child died.
        """
        if not self._is_ready:
            if self._line(START_LIMIT_S) is None:
                raise OSError(f"the child was not ready within {START_LIMIT_S:.0f} s")
            self._is_ready = True
        request = {"prediction": prediction, "reference": reference, "limit_s": limit_s}
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        line = self._line(limit_s)
        return None if line is None else Comparison(bool(json.loads(line)["match"]))

    def _line(self, limit_s: float) -> bytes | None:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                return None
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise OSError("the child ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        """End the child now."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # unsent bytes of a dead child
                pass
        self._process.wait()


class Pool:
    """Children that compare; as many comparisons run at once."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self.pid = os.getpid()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def compare(self, prediction: str, reference: str, limit_s: float) -> Comparison:
        """Whether math-verify finds the two equal; a comparison over the limit counts as not equal."""
        worker = self._idle.get()
        replacement: _Worker | None = None
        try:
            worker = worker or _Worker()
            answer = worker.ask(prediction, reference, limit_s)
            if answer is not None:
                replacement, worker = worker, None
                return answer
            logger.warning("a symbolic comparison took more than %s s and was stopped", limit_s)
            return Comparison(False, f"symbolic comparison took more than {limit_s:g} s")
        except OSError as error:
            logger.warning("a symbolic comparison failed: %s", error)
            return Comparison(False, f"symbolic comparison failed: {error}")
        finally:
            if worker is not None:
                worker.kill()
                replacement = _Worker()
            self._idle.put(replacement)

    def close(self) -> None:
        """End all idle children."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return
            if worker is not None:
                worker.kill()


_LOCK = threading.Lock()
_POOLS: list[Pool] = []  # at most one: this process's


def compare(prediction: str, reference: str, limit_s: float) -> Comparison:
    """Compare in this process's pool, which the first call starts (a forked process starts its own)."""
    with _LOCK:
        if not _POOLS or _POOLS[0].pid != os.getpid():
            _POOLS[:] = [Pool()]
        pool = _POOLS[0]
    return pool.compare(prediction, reference, limit_s)


@atexit.register
def _close() -> None:
    if _POOLS and _POOLS[0].pid == os.getpid():
        _POOLS.pop().close()
