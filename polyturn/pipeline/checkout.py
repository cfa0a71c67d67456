"""Which checkout a working directory belongs to: itself, or the one that made it (git worktree, DVC's experiments)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from polyturn import layout

WORKTREES = layout.STATE / "worktrees"  # of a checkout: flow runs' and reproductions', by name
_EXPERIMENTS = Path(
    ".dvc/tmp/exps"
)  # of `dvc exp run --temp` and --queue: repositories of their own


def main_checkout(root: Path) -> Path:
    """The checkout that `root` is a linked worktree or a temporary experiment of; else `root` itself.

    What worktrees and experiments share (MLflow's database, work in progress, relative data) lies there.
    """
    here = _main_worktree(root.resolve())
    for parent in here.parents:
        if parent.parts[-3:] == _EXPERIMENTS.parts:
            return _main_worktree(parent.parents[2])
    return here


def _main_worktree(root: Path) -> Path:
    command = ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return root
    common = Path(found.stdout.strip())
    return common.parent if common.name == ".git" else _worktree_of(common) or root


def _worktree_of(common: Path) -> Path | None:
    """The checkout of a repository that lies elsewhere, as that of a submodule does; None of one that has none."""
    command = ["git", "config", "--file", str(common / "config"), "core.worktree"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return (common / found.stdout.strip()).resolve() if found.returncode == 0 else None


def from_home(path: str) -> Path:
    """A path in which a ~ at the start means a home directory, as in a shell; it stays where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def from_checkout(path: str, root: Path = Path()) -> Path:
    """A path of params.yaml: as it is where that exists, else as seen from the main checkout, whose untracked files a worktree lacks.

    The value stays relative in params.yaml, so that worktree and checkout have the same params and share the run cache.
    """
    here = from_home(path)
    if here.is_absolute() or (root / here).exists():
        return here
    there = main_checkout(root) / here
    return there if there.exists() else here
