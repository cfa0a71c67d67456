"""Data digests as DVC recorded them; dvc.lock is read as a file, because `dvc status` fails inside a stage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml


def lock_digests(lock: Path) -> dict[str, str]:
    """Path -> md5 (directories end in ".dir") of every dep and out in dvc.lock, outs last; {} if there is none.

    Raises:
        ValueError: dvc.lock is not YAML of DVC's shape.
    """
    if not lock.exists():
        return {}
    try:
        stages = cast("Mapping[str, Mapping[str, list[Mapping[str, str]]]]", _stages(lock))
        entries = [
            entry
            for kind in ("deps", "outs")
            for stage in stages.values()
            for entry in stage.get(kind, ())
        ]
        return {str(entry["path"]): str(entry["md5"]) for entry in entries if "md5" in entry}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{lock} is no dvc.lock ({error}); run dvc repro to write it anew"
        ) from None


def _stages(lock: Path) -> object:
    tree = cast("Mapping[str, object] | None", yaml.safe_load(lock.read_text()))
    return (tree or {}).get("stages", {})


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_digest(directory: Path) -> str:
    """sha256 over the relative names and contents of all files, in name order."""
    total = hashlib.sha256()
    for path in sorted(directory.rglob("*"), key=lambda p: p.relative_to(directory).as_posix()):
        if path.is_file():
            total.update(
                f"{path.relative_to(directory).as_posix()}\0{file_digest(path)}\n".encode()
            )
    return total.hexdigest()
