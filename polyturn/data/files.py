"""Files that are either whole or absent, JSON lines among them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

# How an object lies in DVC's cache; with DVC's cache.type symlink the files of outs and datasets are links to such.
_DVC_OBJECT = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")


def inside(root: Path, name: str) -> Path | None:
    """The file `name` below `root`, links followed; None where it leads out, other than into DVC's cache.

    Raises:
        OSError, ValueError: `name` is too long, or none.
    """
    base = root.resolve()
    path = Path(os.path.normpath(base / name))
    if not (path.is_relative_to(base) or path.is_relative_to(root.absolute())):
        return None
    found = path.resolve()
    is_ours = found.is_relative_to(base) or _DVC_OBJECT.search(found.as_posix())
    return found if is_ours else None


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
