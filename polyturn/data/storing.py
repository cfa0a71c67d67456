"""Fetched bytes -> a PNG of the store; run as a module, it is the child process that store_pool.py feeds.

The child reads frames (length, pickle) from its input: first the limits and the directory, then lists of pictures,
each answered by the list of their outcomes. It ends with its input, so it never outlives its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from polyturn.data.files import atomic_path
from polyturn.data.normalise import normalise
from polyturn.data.outcome import ImageOutcome
from polyturn.data.quarantine import RowError
from polyturn.params import ImagesParams

LENGTH = struct.Struct(">Q")  # in front of each pickle


@dataclass(frozen=True)
class Picture:
    """One fetched body, its hash, and its source as it may be shown."""

    shown: str
    data: bytes = field(repr=False)
    sha256: str


def store_image(picture: Picture, limits: ImagesParams, png_dir: Path) -> ImageOutcome:
    """Normalise one body and put its PNG into `png_dir`, named by its hash."""
    size = len(picture.data)
    try:
        image = normalise(picture.data, limits)
    except RowError as error:
        return ImageOutcome(picture.shown, error.reason, error.detail, picture.sha256, size)
    path = png_dir / f"{image.sha256}.png"
    if not path.exists():
        with atomic_path(path) as partial:
            partial.write_bytes(image.png)
    return ImageOutcome(
        url=picture.shown,
        source_sha256=picture.sha256,
        source_bytes=size,
        source_format=image.source.format,
        source_mode=image.source.mode,
        source_width=image.source.width,
        source_height=image.source.height,
        num_frames=image.source.num_frames,
        png_sha256=image.sha256,
        width=image.width,
        height=image.height,
    )


def frame(content: object) -> bytes:
    """What goes through the pipe for one object."""
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def _read_frame(stream: BinaryIO) -> object | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    limits, png_dir = cast("tuple[ImagesParams, Path]", _read_frame(sys.stdin.buffer))
    while (pictures := _read_frame(sys.stdin.buffer)) is not None:
        outcomes = [store_image(p, limits, png_dir) for p in cast("list[Picture]", pictures)]
        answers.write(frame(outcomes))
        answers.flush()


if __name__ == "__main__":
    main()
