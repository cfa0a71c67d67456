"""What the next `dvc repro` would run and why, in a few lines for each stage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from polyturn import layout

MAX_REASONS = 8

# As DVC's --json says it: a text ("changed command"), or what changed -> path -> how.
Change = str | Mapping[str, Mapping[str, object]]


class PlanError(ValueError):
    """DVC cannot say what is stale; the message holds its own."""


def lines(root: Path) -> list[str]:
    """Stages that would run, with the first reasons; then the seconds that stages took when they last ran.

    Raises:
        PlanError: `dvc status` failed.
    """
    status = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if status.returncode != 0:
        raise PlanError(f"dvc status: {status.stderr.strip() or status.returncode}")
    shown = stale_lines(json.loads(status.stdout), _locked(root / layout.DVC_LOCK))
    times = _last_times(root / layout.STATE / "timings.jsonl")
    if times:
        shown += ["", "seconds that each stage took when it last ran:"]
        shown += [f"  {stage:<10} {seconds:8.1f}" for stage, seconds in times.items()]
    return shown


def stale_lines(stale: Mapping[str, Sequence[Change]], locked: frozenset[str]) -> list[str]:
    """A block for each stale stage; one without a record in dvc.lock differs in every file, which says nothing.

    >>> stale_lines({"train": [{"changed deps": {"a.py": "modified"}}], "register": []}, frozenset({"train"}))
    ['train:', '  modified  a.py', 'register: never ran in this checkout']
    """
    shown: list[str] = []
    for stage, changes in stale.items():
        if stage not in locked:
            shown.append(f"{stage}: never ran in this checkout")
            continue
        reasons = [reason for change in changes for reason in _reasons(change)]
        shown.append(f"{stage}:")
        shown += [f"  {reason}" for reason in reasons[:MAX_REASONS]]
        if len(reasons) > MAX_REASONS:
            shown.append(f"  and {len(reasons) - MAX_REASONS} more (`dvc status {stage}`)")
    return shown or ["nothing would run: everything is up to date"]


def _reasons(change: Change) -> list[str]:
    if isinstance(change, str):
        return [change]
    found: list[str] = []
    for paths in change.values():
        for path, how in paths.items():
            if isinstance(how, Mapping):  # keys of params.yaml
                keys = cast("Mapping[str, object]", how)
                found += [f"{said}  {path}: {key}" for key, said in keys.items()]
            else:
                found.append(f"{how}  {path}")
    return found


def _locked(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    document = yaml.safe_load(path.read_text()) or {}
    return frozenset(document.get("stages", {}))


def _last_times(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["stage"]: record["seconds"] for record in records}
