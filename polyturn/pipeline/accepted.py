"""Outputs that were kept although the code of their stage has changed: who said why, in accepted.jsonl, a file of git."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import yaml

from polyturn import layout

_Lock = Mapping[str, Mapping[str, Sequence[Mapping[str, str]]]]


@dataclass(frozen=True)
class Acceptance:
    """A stage whose outputs stand for code that has not made them: `files` are MD5s of the changed ones, old and new.

    `outs` are the MD5s of the outputs then; when the stage has run again and wrote others, it says nothing any more.
    """

    stage: str
    reason: str
    by: str
    at: str
    commit: str
    files: Mapping[str, tuple[str, str]]
    outs: Mapping[str, str]

    def holds(self, lock: _Lock) -> bool:
        """Whether dvc.lock still has these outputs under that code."""
        stage = lock.get(self.stage, {})
        deps, outs = digests(stage, "deps"), digests(stage, "outs")
        files_hold = all(deps.get(path) == new for path, (_, new) in self.files.items())
        return files_hold and outs == dict(self.outs)


def append(root: Path, acceptance: Acceptance) -> None:
    """Write one line more."""
    with (root / layout.ACCEPTED).open("a") as file:
        file.write(json.dumps(asdict(acceptance)) + "\n")


def read(root: Path) -> list[Acceptance]:
    """All that were ever written, in order.

    Raises:
        ValueError: a line cannot be read.
    """
    path = root / layout.ACCEPTED
    if not path.is_file():
        return []
    found: list[Acceptance] = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line:
            continue
        try:
            found.append(Acceptance(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no acceptance: {error}") from None
    return found


def holding(root: Path) -> list[Acceptance]:
    """Those that are true of the outputs that are there."""
    lock = locked(root)
    return [acceptance for acceptance in read(root) if acceptance.holds(lock)]


def tags(root: Path) -> dict[str, str]:
    """What a run that builds on accepted outputs says of them in MLflow.

    {"accepted.train": "comment reworded (by ada, 1a2b3c4d5e)"}
    """
    found: dict[str, list[str]] = {}
    for acceptance in holding(root):
        line = f"{acceptance.reason} (by {acceptance.by}, {acceptance.commit[:10]})"
        found.setdefault(f"accepted.{acceptance.stage}", []).append(line)
    return {name: "; ".join(lines) for name, lines in found.items()}


def locked(root: Path) -> _Lock:
    """The stages of dvc.lock."""
    path = root / layout.DVC_LOCK
    document = (yaml.safe_load(path.read_text()) if path.is_file() else None) or {}
    return cast("_Lock", document.get("stages", {}))


def digests(stage: Mapping[str, Sequence[Mapping[str, str]]], kind: str) -> dict[str, str]:
    """The MD5s of a stage's deps or outs in dvc.lock, by path."""
    return {entry["path"]: entry.get("md5", "") for entry in stage.get(kind, ())}
