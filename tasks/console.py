"""What a running stage shows on the user's terminal: log lines, with a progress bar below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm

from polyturn.progress import ProgressLine

_LINE_INTERVAL_S = 15.0  # between progress lines where there is no terminal


class Console:
    """Writes lines through `log`; progress is a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._bar: tqdm[NoReturn] | None = None
        self._logged_s = time.monotonic()

    def line(self, text: str) -> None:
        """Write one line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        self._log(text)
        if self._bar is not None:
            self._bar.refresh()

    def progress(self, line: ProgressLine) -> None:
        """Show how far the stage has come."""
        if sys.stderr.isatty():
            if self._bar is None or self._bar.total != line.total or line.done < self._bar.n:
                self.close()
                self._bar = tqdm(total=line.total, dynamic_ncols=True, leave=False)
            self._bar.set_description_str(line.text, refresh=False)
            self._bar.update(line.done - self._bar.n)
        elif time.monotonic() - self._logged_s >= _LINE_INTERVAL_S:
            self._logged_s = time.monotonic()
            self._log(f"{line.done}/{line.total} {line.text}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
