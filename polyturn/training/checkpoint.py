"""The files of a training run's checkpoints: digests and marker last, damaged ones set aside, oldest removed."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from polyturn import directories
from polyturn.types import Json

logger = logging.getLogger(__name__)

MARKER = "complete.json"  # written last: {"files": {name: sha256}, "state": {...}}
DAMAGED = ".damaged"  # ending of one that was found incomplete or changed; never looked at again
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what odd markers raise
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that was asked for cannot be used."""


def partial_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written until it is complete."""
    return directory / f".step_{step:06d}.partial"


def begin(directory: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` to."""
    partial = partial_path(directory, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(directory: Path, step: int, state: Mapping[str, Json]) -> Path:
    """Make what was written count: digests of all files and the marker, then the rename.

    Until then the earlier checkpoints are as they were.
    """
    partial = partial_path(directory, step)
    final = directory / f"step_{step:06d}"
    files = {
        str(path.relative_to(partial)): _digest(path)
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    (partial / MARKER).write_text(json.dumps({"files": files, "state": state}, indent=1))
    directories.replace(partial, final)
    return final


def discard(directory: Path, step: int) -> None:
    """Remove what was written of a checkpoint that did not become complete."""
    shutil.rmtree(partial_path(directory, step), ignore_errors=True)


def superfluous(steps: Iterable[int], keep: int, *, newest: int) -> list[int]:
    """The steps, in order, whose checkpoints go once that of step `newest` is written: all but it and the `keep` - 1 before it.

    Later ones are of a run that was given up, and a run that is started again must not go on from them.

    >>> superfluous([100, 200, 300, 700], 2, newest=300)
    [100, 700]
    """
    ordered = sorted(steps)
    kept = [step for step in ordered if step <= newest][-keep:]
    return [step for step in ordered if step not in kept]


def prune(directory: Path, keep: int, *, newest: int) -> None:
    """Remove the superfluous checkpoints, now that of step `newest` is written."""
    paths = dict(_by_step(directory))
    for step in superfluous(paths, keep, newest=newest):
        if step > newest:
            logger.warning("%s is removed: the run is at step %d only", paths[step], newest)
        directories.remove(paths[step])


def states(directory: Path) -> list[Mapping[str, Json]]:
    """The states of all kept checkpoints whose marker can be read, oldest first."""
    found: list[Mapping[str, Json]] = []
    for path in _paths(directory):
        try:
            found.append(json.loads((path / MARKER).read_text())["state"])
        except _UNREADABLE:  # `latest` tells when it comes to it
            continue
    return found


def latest(directory: Path) -> tuple[Path, Mapping[str, Json]] | None:
    """The newest complete checkpoint and its state; damaged ones are named in a warning and marked by their name."""
    for path in reversed(_paths(directory)):
        problem = _damage(path)
        if problem is None:
            state: Mapping[str, Json] = json.loads((path / MARKER).read_text())["state"]
            return path, state
        aside = path.with_name(path.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        logger.warning("checkpoint %s is passed over: %s; it is now %s", path, problem, aside.name)
    return None


def _paths(directory: Path) -> list[Path]:
    return [path for _, path in _by_step(directory)]


def _by_step(directory: Path) -> list[tuple[int, Path]]:
    return sorted((int(match[1]), path) for path in directory.glob("step_*")
                  if (match := _NAME.fullmatch(path.name)))  # fmt: skip


def _damage(path: Path) -> str | None:
    try:
        content = json.loads((path / MARKER).read_text())
        wrong = [
            name for name, digest in content["files"].items() if _digest(path / name) != digest
        ]
        content["state"]
    except _UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return f"digest of {', '.join(wrong)} differs" if wrong else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
