"""Pictures in a terminal: inline where it can show them, else as the path of a file."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from polyturn.data.files import atomic_path
from polyturn.types import ImageRecord

Protocol = Literal["kitty", "iterm2"]
_CHUNK = 4096  # characters of a kitty escape code


def inline_protocol(environment: Mapping[str, str], *, is_terminal: bool) -> Protocol | None:
    """How the terminal described by environment variables shows pictures; None if it does not, or behind tmux.

    >>> inline_protocol({"TERM": "xterm-kitty"}, is_terminal=True)
    'kitty'
    """
    if (
        not is_terminal
        or environment.get("TMUX")
        or environment.get("TERM", "").startswith("screen")
    ):
        return None
    program = environment.get("TERM_PROGRAM", "").lower()
    if "KITTY_WINDOW_ID" in environment or "kitty" in environment.get("TERM", ""):
        return "kitty"
    if program == "ghostty":
        return "kitty"
    is_iterm = program in ("iterm.app", "wezterm") or environment.get("LC_TERMINAL") == "iTerm2"
    return "iterm2" if is_iterm else None


def inline(png: bytes, protocol: Protocol) -> str:
    """The escape codes that show a PNG (kitty graphics protocol; iTerm2 inline images protocol)."""
    text = base64.b64encode(png).decode()
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(png)}:{text}\a"
    return "".join(_kitty(text))


def _kitty(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHUNK):
        head = "f=100,a=T," if start == 0 else ""
        is_last = start + _CHUNK >= len(text)
        yield f"\x1b_G{head}m={0 if is_last else 1};{text[start : start + _CHUNK]}\x1b\\"


class Terminal:
    """Standard output and input as the screen of a game; pictures also go to files of `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._protocol: Protocol | None = inline_protocol(
            os.environ, is_terminal=sys.stdout.isatty()
        )
        self._num_shown = 0

    def say(self, text: str) -> None:
        """Show text."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def show(self, picture: ImageRecord) -> None:
        """Show a picture: inline where the terminal can, and by its path."""
        path = self._directory / f"{self._num_shown}.png"
        self._num_shown += 1
        with atomic_path(path) as partial:
            partial.write_bytes(picture.read())
        if self._protocol is not None:
            self.say(inline(picture.read(), self._protocol))
        self.say(f"picture {path} ({picture.width} x {picture.height})")

    def reply(self, turn: int) -> str | None:
        """One line from the keyboard, more after a line that ends with a backslash; None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                lines.append(input(f"reply {turn}> " if not lines else "... "))
            except EOFError:
                self.say("")
                return None
            if not sys.stdin.isatty():
                self.say(lines[-1])  # what was typed stands on the screen in any case
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]
