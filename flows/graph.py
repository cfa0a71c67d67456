"""The pipeline as DVC sees it: the order of its stages, and the plan of what would run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import networkx as nx
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.stage import PipelineStage

from polyturn.pipeline import dvc_objects, plan
from polyturn.pipeline.plan import Plan, Status
from polyturn.pipeline.workspace import WorkspaceError

_LOCK_WAIT_S = 120.0


def read(root: Path, *, wait_s: float = _LOCK_WAIT_S) -> Plan:
    """Read dvc.yaml and dvc.lock of the checkout `root`, and compare them with the files.

    Raises:
        WorkspaceError: another dvc has been at work in `root` for longer than `wait_s`, or DVC cannot read its files there.
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
    """Stage names in the order in which they run; needs no lock.

    Raises:
        WorkspaceError: DVC cannot read its files in `root`.
    """
    with _opened(root) as repo:
        return tuple(str(stage.name) for stage in _in_order(repo))


def is_stale(root: Path, stage: str) -> bool:
    """Whether the stage would run now, its inputs being what they are."""
    with _opened(root) as repo:
        return bool(repo.status([stage], with_deps=False))


@contextmanager
def _opened(root: Path) -> Iterator[Repo]:
    """What DVC refuses to read (dvc.yaml, dvc.lock with marks of a merge, its own files) becomes one line."""
    try:
        with Repo(str(root)) as repo:
            yield repo
    except LockError:
        raise
    except DvcException as error:
        raise WorkspaceError(_explained(root, error)) from None


def _explained(root: Path, error: DvcException) -> str:
    causes = [error, error.__cause__] if error.__cause__ else [error]
    said = ": ".join(" ".join(str(cause).split())[:300] for cause in causes)
    return f"DVC cannot read {root}: {said}{dvc_objects.advice(said)}"


def _read(root: Path) -> Plan:
    with _opened(root) as repo:
        stages = _in_order(repo)
        status = cast("Status", repo.status())
    # DVC addresses a stage relative to the current directory, which need not be `root`
    changes = {
        str(stage.name): status[str(stage.addressing)]
        for stage in stages
        if stage.addressing in status
    }
    return plan.build(root, [str(stage.name) for stage in stages], changes)


def _in_order(repo: Repo) -> list[PipelineStage]:
    # an edge of DVC's graph points from a stage to what it depends on
    return list(reversed(list(nx.topological_sort(repo.index.graph))))
