"""What becomes of one image: a record of what its content determines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageOutcome:
    """What became of one image, with nothing of time or place."""

    url: str  # as written in the dataset, without secrets
    reason: str = ""  # empty: usable
    detail: str = ""
    source_sha256: str = ""
    source_bytes: int = 0
    source_format: str = ""
    source_mode: str = ""
    source_width: int = 0
    source_height: int = 0
    num_frames: int = 0
    png_sha256: str = ""
    width: int = 0
    height: int = 0
