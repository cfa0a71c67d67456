"""What the next `dvc repro` would run and why, how long that took the last time and what it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import yaml

from polyturn import layout, params
from polyturn.params_tree import read_tree
from polyturn.pipeline.checkout import main_checkout
from polyturn.pipeline.dvc_objects import advice, is_locked
from polyturn.pipeline.plan_reasons import Change, Lock, Reason, reasons_of

MAX_REASONS = 8
_HOLDER = re.compile(r"\(PID \d+\): .+")  # of a lock, as DVC prints it
TIMINGS = layout.STATE / "timings.jsonl"

Status = Mapping[str, Sequence[Change]]
State = Literal["runs", "may run", "up to date"]


class PlanError(ValueError):
    """DVC cannot say what is stale; the message holds its own."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: `seconds` of its last run here (None: it has none), `cost` at doctor.prices_per_hour.

    A stage behind one that runs "may run": that depends on what the one before it writes.
    """

    name: str
    state: State
    reasons: Sequence[Reason]
    seconds: float | None
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """All stages in the order in which they run."""

    stages: Sequence[StagePlan]

    @property
    def seconds(self) -> float | None:
        """Of all stages that run or may run, as far as they are known; None if none is."""
        known = [s.seconds for s in self.waiting if s.seconds is not None]
        return sum(known) if known else None

    @property
    def cost(self) -> float | None:
        """Of the same stages; None without prices."""
        known = [s.cost for s in self.waiting if s.cost is not None]
        return sum(known) if known else None

    @property
    def unknown(self) -> list[str]:
        """Stages that run or may run, of which no run is known."""
        return [stage.name for stage in self.waiting if stage.seconds is None]

    @property
    def waiting(self) -> list[StagePlan]:
        """Stages that run or may run."""
        return [stage for stage in self.stages if stage.state != "up to date"]


def read(root: Path) -> Plan:
    """Ask DVC what is stale in the checkout `root`.

    Raises:
        PlanError: `dvc status` failed, or another DVC command works in the checkout.
        ParamsError: params.yaml is wrong.
    """
    status = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if is_locked(status.stderr):
        holders = ", ".join(sorted(set(_HOLDER.findall(status.stderr)))) or "another dvc command"
        raise PlanError(f"{holders} works in this checkout; ask again when it has ended")
    if status.returncode != 0:
        said = " ".join(status.stderr.split())[:500]
        raise PlanError(f"dvc status: {said or status.returncode}{advice(said)}")
    order = list(cast("Mapping[str, object]", read_tree(root / layout.DVC_YAML)["stages"]))
    return build(root, order, json.loads(status.stdout))


def build(root: Path, order: Sequence[str], status: Status) -> Plan:
    """The plan that DVC's status amounts to."""
    locked = _locked(root / layout.DVC_LOCK)
    prices = params.load(root / layout.PARAMS).doctor.prices_per_hour
    times = last_seconds(root)
    stages: list[StagePlan] = []
    is_behind = False
    for name in order:
        reasons = list(reasons_of(root, name, status.get(name, ()), locked.get(name)))
        state: State = "runs" if reasons else "may run" if is_behind else "up to date"
        is_behind = is_behind or bool(reasons)
        price = prices.get(name, prices.get("default"))
        seconds = times.get(name)
        cost = None if price is None or seconds is None else price * seconds / 3600
        stages.append(StagePlan(name, state, reasons, seconds, cost))
    return Plan(stages)


def lines(plan: Plan, *, with_diffs: bool = False) -> list[str]:
    """The plan for a terminal."""
    if not plan.waiting:
        return ["nothing would run: everything is up to date"]
    width = max(len(stage.name) for stage in plan.stages)
    shown: list[str] = []
    for stage in plan.stages:
        shown.append(f"{stage.name:<{width}}  {stage.state:<10}  {_expected(stage)}".rstrip())
        shown += _shown_reasons(stage, with_diffs=with_diffs)
    if plan.seconds is not None:
        unknown = f", and what is not known of {', '.join(plan.unknown)}" if plan.unknown else ""
        cost = "" if plan.cost is None else f", {plan.cost:.2f} at doctor.prices_per_hour"
        shown += ["", f"as in the last runs: {duration(plan.seconds)}{cost}{unknown}"]
    return shown


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [duration(s) for s in (8.4, 200, 7300)]
    ['8.4 s', '3.3 min', '2.0 h']
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def last_seconds(root: Path) -> dict[str, float]:
    """Seconds of each stage's last run in this checkout; of a worktree's main checkout where it has none."""
    found: dict[str, float] = {}
    for directory in (main_checkout(root), root):
        path = directory / TIMINGS
        if path.is_file():
            for line in path.read_text().split("\n"):
                with suppress(
                    ValueError, KeyError, TypeError
                ):  # one that a kill or a full disk has cut
                    record = json.loads(line)
                    found[record["stage"]] = float(record["seconds"])
    return found


def _expected(stage: StagePlan) -> str:
    if stage.state == "up to date" or stage.seconds is None:
        return ""
    cost = "" if stage.cost is None else f", {stage.cost:.2f}"
    return f"{duration(stage.seconds)}{cost}"


def _shown_reasons(stage: StagePlan, *, with_diffs: bool) -> list[str]:
    limit = len(stage.reasons) if with_diffs else MAX_REASONS
    shown = [f"    {reason}" for reason in stage.reasons[:limit]]
    if len(stage.reasons) > limit:
        shown.append(
            f"    and {len(stage.reasons) - limit} more (`polyturn plan --diff` shows all)"
        )
    if with_diffs:
        shown += [f"    | {line}" for r in stage.reasons for line in r.diff.splitlines()]
    return shown


def _locked(path: Path) -> Mapping[str, Lock]:
    if not path.is_file():
        return {}
    document = yaml.safe_load(path.read_text()) or {}
    return document.get("stages", {})
