"""What has changed in a file of code since the version that a stage ran with, which dvc.lock knows by its digest alone."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MAX_COMMITS = 20  # of a file's history that are searched


@dataclass(frozen=True)
class CodeChange:
    """Lines that a file gained and lost since commit `since`, the newest one that has the version that ran.

    `since` None: no commit has it (it ran with edits that were not committed, or this is no repository).
    """

    path: str
    since: str | None = None
    num_added: int = 0
    num_removed: int = 0
    diff: str = ""


@lru_cache(maxsize=1024)  # most files are deps of several stages
def code_change(root: Path, path: str, md5: str | None) -> CodeChange:
    """Find the version with that MD5 in git's history of `path`, and compare the file as it is now with it."""
    since = next(
        (commit for commit in _history(root, path) if _md5_at(root, commit, path) == md5), None
    )
    if since is None:
        return CodeChange(path)
    diff = _git(
        root, "diff", "--no-color", "--no-ext-diff", "--unified=1", since, "--", path
    ).decode(errors="replace")
    body = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    return CodeChange(
        path,
        since,
        num_added=sum(line.startswith("+") for line in body),
        num_removed=sum(line.startswith("-") for line in body),
        diff=diff,
    )


def _history(root: Path, path: str) -> list[str]:
    """Commits that changed the file, newest first."""
    return _git(root, "log", f"-{_MAX_COMMITS}", "--format=%H", "--", path).decode().split()


def _md5_at(root: Path, commit: str, path: str) -> str | None:
    content = _git(root, "show", f"{commit}:./{path}")
    return hashlib.md5(content, usedforsecurity=False).hexdigest() if content else None


def _git(root: Path, *arguments: str) -> bytes:
    """Output of a git command; empty where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""
