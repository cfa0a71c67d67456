"""A stage's declared inputs as they stand: params and file hashes, compared before and after it runs.

DVC reads params and deps after the command, so an edit in between would be recorded as what was used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn import layout
from polyturn.params_tree import read_tree

_MAX_HASHED_BYTES = 1_000_000  # larger files (weights) are told apart by size and time of change


class ChangedInputError(ValueError):
    """Params or a dep changed while the stage ran; the message names each."""


@dataclass(frozen=True)
class FileState:
    """One file; `digest` is empty for large ones, whose `stat` (size, mtime in ns) stands for them."""

    stat: tuple[int, int]
    digest: str

    def equals(self, other: FileState | None) -> bool:
        """Whether the content is the same."""
        if other is None:
            return False
        return self.digest == other.digest if self.digest else self.stat == other.stat


@dataclass(frozen=True)
class Inputs:
    """The params (sections, or single keys by dotted name) and the dep files of one stage."""

    sections: Mapping[str, object]
    deps: Sequence[str]
    files: Mapping[str, FileState]


def read(stage: str, *, known: Inputs | None = None) -> Inputs:
    """Read what dvc.yaml declares for `stage`; files whose stat is as in `known` are not hashed again.

    Raises:
        ValueError: dvc.yaml has no such stage; ParamsError for an unreadable params.yaml or dvc.yaml.
    """
    declared = cast(
        "Mapping[str, Mapping[str, Sequence[str]]]", read_tree(layout.DVC_YAML)["stages"]
    )
    if stage not in declared:
        raise ValueError(f"dvc.yaml has no stage {stage!r}, only {', '.join(declared)}")
    tree = read_tree(layout.PARAMS)
    sections = {name: _value(tree, name) for name in declared[stage].get("params", ())}
    before = known.files if known else {}
    files = {
        str(path): _state(path, before.get(str(path)))
        for dep in declared[stage].get("deps", ())
        for path in _walk(Path(dep))
    }
    return Inputs(sections, declared[stage].get("deps", ()), files)


def check_unchanged(before: Inputs, after: Inputs) -> None:
    """Compare two readings.

    Raises:
        ChangedInputError: they differ; the message names the keys and files.
    """
    keys = list(_changed_keys(before.sections, after.sections))
    names = sorted(set(before.files) | set(after.files))
    files = [name for name in names if not _same(before.files.get(name), after.files.get(name))]
    if keys or files:
        changed = [f"params.yaml: {key}" for key in keys] + files[:5]
        more = f" and {len(files) - 5} more files" if len(files) > 5 else ""
        raise ChangedInputError(
            f"{', '.join(changed)}{more} changed while the stage ran, so its outputs would be recorded "
            "under inputs that they do not come from; run it again"
        )


def _value(tree: object, dotted: str) -> object:
    for part in dotted.split("."):
        tree = cast("Mapping[str, object]", tree).get(part) if isinstance(tree, Mapping) else None
    return tree


def _same(before: FileState | None, after: FileState | None) -> bool:
    return before is not None and before.equals(after)


def _changed_keys(old: object, new: object, prefix: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        old, new = cast("Mapping[str, object]", old), cast("Mapping[str, object]", new)
        for key in sorted({*old, *new}):
            yield from _changed_keys(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
    elif old != new:
        yield f"{prefix} (was {old!r}, is {new!r})"


def _walk(path: Path) -> Iterator[Path]:
    """The files of a dep; bytecode that an import writes beside plug-ins is none."""
    if path.is_file():
        yield path
    for directory, names, files in os.walk(path):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (Path(directory, name) for name in files)


def _state(path: Path, known: FileState | None) -> FileState:
    status = path.stat()
    stat = (status.st_size, status.st_mtime_ns)
    if known and known.stat == stat:
        return known
    if status.st_size > _MAX_HASHED_BYTES:
        return FileState(stat, "")
    return FileState(stat, hashlib.sha256(path.read_bytes()).hexdigest())
