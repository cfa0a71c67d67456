"""Snapshots of a directory of work in a store of objects: files by their digest, the snapshot's own object last.

`blobs/SHA256` holds a file's bytes, so that what a later snapshot shares with an earlier one is sent once.
`snapshot_000010.json` names every file of the snapshot of step 10 with its digest; as it is written last, a snapshot is
whole or does not exist.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from polyturn.objects import Objects
from polyturn.training.checkpoint import superfluous

logger = logging.getLogger(__name__)

_NAME = re.compile(r"snapshot_(\d{6,})\.json")
_BLOBS = "blobs/"


class Snapshots:
    """The snapshots of one run's work; the one just pushed and the `keep` - 1 before it stay."""

    def __init__(self, objects: Objects, *, keep: int) -> None:
        self.objects = objects
        self._keep = keep
        self._stored: set[str] | None = None  # digests of blobs that are there

    def latest(self) -> int | None:
        """The step of the newest one."""
        return max(self._steps(), default=None)

    def push(self, step: int, directory: Path, *, known: Mapping[Path, str] | None = None) -> None:
        """Store all files of `directory` as the snapshot of `step`; then those go that checkpoint.superfluous names.

        `known`: digests (SHA-256) of files, by path below `directory`, that need not be computed again.
        """
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {
            str(path.relative_to(directory)): (known or {}).get(path.relative_to(directory))
            or _digest(path)
            for path in paths
        }
        if self._stored is None:
            self._stored = {name.removeprefix(_BLOBS) for name in self.objects.names(_BLOBS)}
        for name, digest in files.items():
            if digest not in self._stored:
                self.objects.upload(f"{_BLOBS}{digest}", directory / name)
                self._stored.add(digest)
        self.objects.put(_object_name(step), json.dumps({"files": files}).encode())
        self._prune(newest=step)

    def pull(self, directory: Path) -> int | None:
        """Bring the newest whole snapshot into `directory`, which is replaced; returns its step, None without one.

        One with a blob that is missing or whose digest differs is removed, with a warning, and the one before it is taken.
        """
        for step in sorted(self._steps(), reverse=True):
            partial = directory.with_name(f".{directory.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            problem = self._fetch(step, partial)
            if problem is None:
                shutil.rmtree(directory, ignore_errors=True)
                partial.rename(directory)
                return step
            shutil.rmtree(partial)
            logger.warning(
                "snapshot of step %d in %s is removed: %s", step, self.objects.address, problem
            )
            self.objects.delete(_object_name(step))
        return None

    def remove(self) -> None:
        """Remove all snapshots and blobs; snapshots first, so that none is left without its files."""
        for name in sorted(self.objects.names(), key=lambda name: name.startswith(_BLOBS)):
            if name.startswith(_BLOBS) or _NAME.fullmatch(name):
                self.objects.delete(name)
        self._stored = None

    def _steps(self) -> list[int]:
        return [
            int(match[1])
            for name in self.objects.names("snapshot_")
            if (match := _NAME.fullmatch(name))
        ]

    def _files(self, step: int) -> Mapping[str, str] | None:
        found = self.objects.get(_object_name(step))
        if found is None:
            return None
        try:
            return cast("Mapping[str, str]", json.loads(found.data)["files"])
        except (ValueError, KeyError, TypeError):
            return None

    def _fetch(self, step: int, directory: Path) -> str | None:
        """Download the files of a snapshot; what is wrong with it, or None."""
        files = self._files(step)
        if files is None:
            return "its object cannot be read"
        for name, digest in files.items():
            path = directory / name
            if not path.resolve().is_relative_to(directory.resolve()):
                return f"{name} lies outside"
            try:
                self.objects.download(f"{_BLOBS}{digest}", path)
            except FileNotFoundError:
                return f"the bytes of {name} are missing"
            if _digest(path) != digest:
                return f"the digest of {name} differs"
        return None

    def _prune(self, *, newest: int) -> None:
        steps = self._steps()
        removed = superfluous(steps, self._keep, newest=newest)
        for step in removed:
            if step > newest:
                logger.warning(
                    "snapshot of step %d in %s is removed: the run is at step %d only",
                    step,
                    self.objects.address,
                    newest,
                )
            self.objects.delete(_object_name(step))
        kept = [self._files(step) for step in steps if step not in removed]
        needed = {digest for files in kept for digest in (files or {}).values()}
        for digest in sorted((self._stored or set()) - needed):
            self.objects.delete(f"{_BLOBS}{digest}")
        self._stored = (self._stored or set()) & needed


def _object_name(step: int) -> str:
    return f"snapshot_{step:06d}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
