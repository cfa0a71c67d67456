"""Checkpoints of a training run in progress: written beside their place, digests and marker last, oldest removed."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from polyturn.types import Json

logger = logging.getLogger(__name__)

MARKER = "complete.json"  # written last: {"files": {name: sha256}, "state": {...}}
KEPT = 2


class CheckpointError(ValueError):
    """A checkpoint that was asked for cannot be used."""


def save(
    directory: Path, step: int, state: Mapping[str, Json], write: Callable[[Path], None]
) -> Path:
    """Write the checkpoint of `step`: `write(dir)` fills it, then the marker makes it count.

    A crash or a full disk at any moment leaves the earlier checkpoints as they were.
    """
    partial = directory / f".step_{step:06d}.partial"
    final = directory / f"step_{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        files = {path.name: _digest(path) for path in sorted(partial.iterdir())}
        (partial / MARKER).write_text(json.dumps({"files": files, "state": state}, indent=1))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in sorted(directory.glob("step_*"))[:-KEPT]:
        shutil.rmtree(old)
    return final


def states(directory: Path) -> list[Mapping[str, Json]]:
    """The states of all kept checkpoints whose marker can be read, oldest first."""
    markers = sorted(directory.glob(f"step_*/{MARKER}"))
    return [json.loads(marker.read_text())["state"] for marker in markers]


def latest(directory: Path) -> tuple[Path, Mapping[str, Json]] | None:
    """The newest complete checkpoint and its state; damaged ones are named in a warning and passed over."""
    for path in sorted(directory.glob("step_*"), reverse=True):
        problem = _damage(path)
        if problem is None:
            state: Mapping[str, Json] = json.loads((path / MARKER).read_text())["state"]
            return path, state
        logger.warning("checkpoint %s is passed over: %s", path, problem)
    return None


def _damage(path: Path) -> str | None:
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        wrong = [name for name, digest in files.items() if _digest(path / name) != digest]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return f"digest of {', '.join(wrong)} differs" if wrong else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
