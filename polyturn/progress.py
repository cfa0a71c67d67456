"""Progress of a loop: a bar on a terminal, else throttled `::progress` lines that a flow understands."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from tqdm import tqdm

_INTERVAL_S = 1.0
_LINE = re.compile(r"::progress (\d+)/(\d+) ?(.*)")


@dataclass(frozen=True)
class ProgressLine:
    """One `::progress` line: `done` of `total` steps, and the text that goes with them."""

    done: int
    total: int
    text: str

    def __str__(self) -> str:
        return f"::progress {self.done}/{self.total} {self.text}".rstrip()


def parse_line(line: str) -> ProgressLine | None:
    """Read a line of a stage's output; None where it is not about progress."""
    match = _LINE.fullmatch(line.strip())
    return ProgressLine(int(match[1]), int(match[2]), match[3]) if match else None


class Progress:
    """Shows how far a loop of `total` steps (0: unknown) has come; close it, or use it as a context.

    On a terminal it is a tqdm bar on stderr. Elsewhere `::progress DONE/TOTAL description key=value ...`
    goes to stdout at most once a second, and always for the first and the last step; nothing unless `is_shown`.
    """

    def __init__(self, total: int, description: str, *, is_shown: bool = True) -> None:
        self._total = total
        self._description = description
        self._done = 0
        self._printed_s = 0.0
        self._bar = None
        self._is_shown = is_shown
        if is_shown and sys.stderr.isatty() and sys.stdout.isatty():
            self._bar = tqdm(total=total or None, desc=description, dynamic_ncols=True)

    def update(self, n: int = 1, **shown: object) -> None:
        """Count `n` more steps and show `shown` beside them (floats with four digits)."""
        values = {key: _short(value) for key, value in shown.items()}
        self._done += n
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(n)
            return
        now = time.monotonic()
        if not self._is_shown:
            return
        if self._done == self._total or now - self._printed_s >= _INTERVAL_S:
            self._printed_s = now
            pairs = " ".join(f"{key}={value}" for key, value in values.items())
            line = ProgressLine(self._done, self._total, f"{self._description} {pairs}".rstrip())
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
