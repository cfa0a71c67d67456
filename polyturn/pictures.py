"""PNGs by content hash, from the directories where stages leave them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pictures:
    """Looks in the directories in turn."""

    directories: Sequence[Path]

    def find(self, sha256: str) -> Path | None:
        """The file of a picture; None where it is nowhere."""
        paths = (directory / f"{sha256}.png" for directory in self.directories)
        return next((path for path in paths if path.exists()), None)

    def data_uri(self, sha256: str) -> str | None:
        """The picture as a data URI; None where it is nowhere."""
        path = self.find(sha256)
        if path is None:
            return None
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
