"""Data digests as DVC recorded them; dvc.lock is read as a file, because `dvc status` fails inside a stage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import yaml

from polyturn.params_tree import parse_yaml


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


def outs_by_stage(lock: str) -> dict[str, dict[str, str]]:
    """Stage -> path -> md5 of its outs, from the text of a dvc.lock; {} for an empty one.

    Raises:
        ValueError: it is not of DVC's shape.
    """
    try:
        stages = cast("Mapping[str, Mapping[str, list[Mapping[str, str]]]]", _parsed(lock))
        return {
            name: {
                str(out["path"]): str(out["md5"]) for out in stage.get("outs", ()) if "md5" in out
            }
            for name, stage in stages.items()
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the recorded dvc.lock is none ({error})") from None


def lock_outs(lock: Path) -> dict[str, str]:
    """Path -> md5 of every out in dvc.lock: what DVC has in its cache.

    Raises:
        ValueError: dvc.lock is not YAML of DVC's shape.
    """
    digests = lock_digests(lock)
    stages = cast("Mapping[str, Mapping[str, list[Mapping[str, str]]]]", _stages(lock))
    paths = {str(entry["path"]) for stage in stages.values() for entry in stage.get("outs", ())}
    return {path: md5 for path, md5 in digests.items() if path in paths}


def _stages(lock: Path) -> object:
    return _parsed(lock.read_text())


def _parsed(lock: str) -> object:
    tree = cast("Mapping[str, object] | None", parse_yaml(lock))
    return (tree or {}).get("stages", {})


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_digest(directory: Path) -> str:
    """sha256 over the relative names and contents of all files, in name order."""
    names = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return listed_digest(directory, names)


def listed_digest(directory: Path, names: Iterable[Path]) -> str:
    """As `directory_digest`, of these files alone."""
    total = hashlib.sha256()
    for name in sorted(path.as_posix() for path in names):
        total.update(f"{name}\0{file_digest(directory / name)}\n".encode())
    return total.hexdigest()
