"""Files and directories that are either whole or absent, JSON lines among them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it becomes `path` when the block ends well and vanishes otherwise."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def publish(built: Path, out: Path) -> None:
    """Replace `out` by a finished directory (a rename where both lie on one disk)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        shutil.rmtree(out)
    shutil.move(built, out)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write one JSON object per line, keys in the order given; returns the number of lines.

    A lone surrogate, which UTF-8 does not have, is written as the escape that JSON has for it.
    """
    count = 0
    with (
        atomic_path(path) as partial,
        partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def read_jsonl(path: Path) -> Iterator[dict[str, object]]:
    """Read a file that `write_jsonl` wrote.

    Raises:
        ValueError: a line is no JSON object; the message names file and line.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number} must be an object, got {type(row).__name__}"
                )
            yield cast("dict[str, object]", row)
