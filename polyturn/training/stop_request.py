"""`polyturn stop`: a file in a training run's work directory asks it to end after this step, with the best policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout, processes
from polyturn.data.files import atomic_path
from polyturn.pipeline.checkout import WORKTREES

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
    """Ask a run of this machine to end before its next step.

    `name` is a checkout's directory; or of a run in this checkout or a worktree of it the MLflow run id (its own or its
    flow's) or the flow run's name, which is the worktree's.

    Returns:
        The run's work directory.

    Raises:
        NoRunError: nothing trains there, or under that name.
    """
    is_directory = Path(name).is_dir()
    roots = [Path(name)] if is_directory else [Path(), *_worktrees(Path())]
    found = {root: running for root in roots if (running := _running(root))}
    for root, running in found.items():
        if is_directory or name in running.run_ids or name == root.name:
            ask_in(running.directory, "polyturn stop")
            return running.directory
    if is_directory:
        raise NoRunError(
            f"no training run is running in {Path(name).absolute()}; name the directory of the checkout or worktree "
            f"in which it does, got {name!r}"
        )
    there = [
        f"in {root.absolute()} trains {' of '.join(running.run_ids)}"
        for root, running in found.items()
    ]
    raise NoRunError(
        f"no run {name!r} trains in {Path().absolute()} or its worktrees ({'; '.join(there) or 'nothing does'})"
    )


def ask_in(directory: Path, by: str) -> None:
    """Ask the run that works in `directory` to end before its next step; `by` is told as who asked."""
    with atomic_path(directory / _REQUEST) as partial:
        partial.write_text(by)


def reason(directory: Path) -> str | None:
    """Why the run that works in `directory` is to end; None while nobody asked."""
    path = directory / _REQUEST
    return f"requested by {path.read_text()}" if path.exists() else None


def _worktrees(root: Path) -> list[Path]:
    return sorted(path for path in (root / WORKTREES).glob("*") if path.is_dir())


def _pointer(root: Path) -> Path:
    return root / _STAGE_DIR.with_suffix(".json")


def _running(root: Path) -> Running | None:
    if not _pointer(root).is_file():
        return None
    content = json.loads(_pointer(root).read_text())
    if not processes.parse(content["process"]).is_alive:  # of an earlier run
        return None
    return Running(Path(content["directory"]), content["run_ids"])
