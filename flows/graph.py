"""The pipeline as DVC sees it: order of the stages, and which are stale for what reason."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import networkx as nx
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.stage import PipelineStage

from polyturn.workspace import WorkspaceError

_LOCK_WAIT_S = 120.0


@dataclass(frozen=True)
class Graph:
    """Stage names in the order in which they run, and for each stale one the reasons, a line each.

    A stage behind a stale one is not stale yet: whether it runs depends on what that one writes.
    """

    order: tuple[str, ...]
    stale: Mapping[str, tuple[str, ...]]


def read(root: Path, *, wait_s: float = _LOCK_WAIT_S) -> Graph:
    """Read dvc.yaml and dvc.lock of the checkout `root`, and compare them with the files.

    Raises:
        WorkspaceError: another dvc has been at work in `root` for longer than `wait_s`.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return _read(root)
        except LockError as error:
            if time.monotonic() > end:
                raise WorkspaceError(
                    f"another dvc is at work in {root}: {' '.join(str(error).split())}; wait until it "
                    "has ended, or run in a worktree of its own"
                ) from None
            time.sleep(2)


def order(root: Path) -> tuple[str, ...]:
    """Stage names in the order in which they run; needs no lock."""
    with Repo(str(root)) as repo:
        return tuple(str(stage.name) for stage in _in_order(repo))


def is_stale(root: Path, stage: str) -> bool:
    """Whether the stage would run now, its inputs being what they are."""
    with Repo(str(root)) as repo:
        return bool(repo.status([stage], with_deps=False))


def _read(root: Path) -> Graph:
    with Repo(str(root)) as repo:
        stages = _in_order(repo)
        status = cast("Mapping[str, Sequence[object]]", repo.status())
    # DVC addresses a stage relative to the current directory, which need not be `root`
    stale = {
        str(stage.name): tuple(_reasons(status[str(stage.addressing)]))
        for stage in stages
        if stage.addressing in status
    }
    return Graph(tuple(str(stage.name) for stage in stages), stale)


def _in_order(repo: Repo) -> list[PipelineStage]:
    # an edge of DVC's graph points from a stage to what it depends on
    return list(reversed(list(nx.topological_sort(repo.index.graph))))


def _reasons(entries: Sequence[object]) -> list[str]:
    """Flatten DVC's report: [{"changed deps": {"params.yaml": {"train.lr": "modified"}}}, "always changed"]."""
    lines: list[str] = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            lines.append(str(entry))
            continue
        for kind, changes in cast("Mapping[str, object]", entry).items():
            if isinstance(changes, Mapping):
                lines.extend(_changes(kind, cast("Mapping[str, object]", changes)))
            else:
                lines.append(kind)
    return lines


def _changes(kind: str, changes: Mapping[str, object]) -> list[str]:
    lines: list[str] = []
    for name, change in changes.items():
        if isinstance(change, Mapping):
            keys = cast("Mapping[str, object]", change).items()
            lines.extend(f"{name}: {key} {how}" for key, how in keys)
        else:
            lines.append(f"{kind.removeprefix('changed ').rstrip('s')} {name} {change}")
    return lines
