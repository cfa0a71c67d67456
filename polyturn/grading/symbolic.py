"""Symbolic comparison by math-verify in child processes that are killed at a time limit.

Works the same from any thread: neither signals nor forks of this process are used. A killed or crashed child is
replaced at once, so the pool stays healthy; starting it (about a second of imports) is not part of the limit.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
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
    """Children that compare; as many comparisons run at once, more wait for a free child."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self.pid = os.getpid()
        self._idle = [_Worker() for _ in range(num_workers)]  # the last is taken first
        self._has_idle = threading.Condition()

    def compare(self, prediction: str, reference: str, limit_s: float) -> Comparison:
        """Whether math-verify finds the two equal; a comparison over the limit counts as not equal."""
        with self._has_idle:
            self._has_idle.wait_for(lambda: self._idle)
            worker = self._idle.pop()
        is_usable = False
        try:
            answer = worker.ask(prediction, reference, limit_s)
            is_usable = answer is not None
        except OSError as error:
            answer = Comparison(False, f"symbolic comparison failed: {error}")
        finally:
            self._give_back(worker, is_usable=is_usable)
        answer = answer or Comparison(False, f"symbolic comparison took more than {limit_s:g} s")
        if answer.failure:
            logger.warning("%s", answer.failure)
        return answer

    def _give_back(self, worker: _Worker, *, is_usable: bool) -> None:
        if not is_usable:
            worker.kill()
            worker = _Worker()
        with self._has_idle:
            # a fresh child is taken last, while it imports sympy
            self._idle.insert(len(self._idle) if is_usable else 0, worker)
            self._has_idle.notify()

    def close(self) -> None:
        """End all idle children."""
        with self._has_idle:
            for worker in self._idle:
                worker.kill()
            self._idle.clear()


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
