"""`polyturn stop`: a file in a training run's work directory asks it to end after this step, with the best policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout, processes
from polyturn.data.files import atomic_path

_STAGE_DIR = layout.STATE / "work" / "train"
_REQUEST = "stop"


class NoRunError(ValueError):
    """No training run of that name is running."""


@dataclass(frozen=True)
class Running:
    """The training run of a checkout: its work directory, and the MLflow runs (stage, flow) that it belongs to."""

    directory: Path
    run_ids: Sequence[str]


def announce(running: Running, root: Path = Path()) -> None:
    """Say in checkout `root` which run this process trains there; the word ends with the process."""
    content = {
        "directory": str(running.directory.absolute()),
        "run_ids": running.run_ids,
        "process": str(processes.current()),
    }
    with atomic_path(_pointer(root)) as partial:
        partial.write_text(json.dumps(content))


def ask(name: str) -> Path:
    """Ask a run to end before its next step; `name` is a checkout's directory, or an MLflow run id in this one.

    Returns:
        The run's work directory.

    Raises:
        NoRunError: nothing trains there, or under that id.
    """
    root = Path(name) if Path(name).is_dir() else Path()
    running = _running(root)
    if running is None:
        raise NoRunError(
            f"no training run is running in {root.absolute()}; name the directory of the checkout or worktree "
            f"in which it does, got {name!r}"
        )
    if not Path(name).is_dir() and name not in running.run_ids:
        raise NoRunError(
            f"the run that trains in {root.absolute()} is {' of '.join(running.run_ids)}, not {name!r}"
        )
    with atomic_path(running.directory / _REQUEST) as partial:
        partial.write_text("polyturn stop")
    return running.directory


def reason(directory: Path) -> str | None:
    """Why the run that works in `directory` is to end; None while nobody asked."""
    path = directory / _REQUEST
    return f"requested by {path.read_text()}" if path.exists() else None


def _pointer(root: Path) -> Path:
    return root / _STAGE_DIR.with_suffix(".json")


def _running(root: Path) -> Running | None:
    if not _pointer(root).is_file():
        return None
    content = json.loads(_pointer(root).read_text())
    if not processes.parse(content["process"]).is_alive:  # of an earlier run
        return None
    return Running(Path(content["directory"]), content["run_ids"])
