"""What a run came to, read from the files that its stages wrote."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn import layout
from polyturn.evaluation import results
from polyturn.pipeline.plan import Plan, duration
from polyturn.pipeline.plan_reasons import Reason
from tasks.stage import StageReport

_SCORES = {"sampled": "sampled", "greedy": "greedy", "training_env": "training's environment"}
_MAX_REASONS = 4  # of a stage, in the table of the plan
_NUM_ENDS = 5  # steps of the reward curve that make its beginning and its end


@dataclass(frozen=True)
class Row:
    """One line of the summary table."""

    what: str
    value: str


def read(root: Path) -> list[Row]:
    """The rows that the files in `root` give; a file that is not there gives none."""
    rows: list[Row] = []
    if (root / layout.CURVE).is_file():
        rows.extend(_reward(root / layout.CURVE))
    if (root / layout.TRAIN_RUN).is_file():
        rows.extend(_early_end(json.loads((root / layout.TRAIN_RUN).read_text())))
    if (root / layout.METRICS).is_file():
        rows.extend(_accuracy(json.loads((root / layout.METRICS).read_text())))
    if (root / layout.REGISTERED).is_file():
        rows.extend(_registered(json.loads((root / layout.REGISTERED).read_text())))
    return rows


def scores(root: Path) -> dict[str, float]:
    """What the evaluation in `root` measured, under the names that its own MLflow run has for it; without one nothing."""
    path = root / layout.METRICS
    if not path.is_file():
        return {}
    test = cast("Mapping[str, object]", json.loads(path.read_text())["test"])
    blocks = {policy: block for policy, block in test.items() if isinstance(block, Mapping)}
    return results.scores(blocks)


def _reward(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rewards = [float(row["reward_mean"]) for row in csv.DictReader(file) if row["reward_mean"]]
    if not rewards:
        return []
    first, last = rewards[:_NUM_ENDS], rewards[-_NUM_ENDS:]
    return [
        Row(
            "reward while training",
            f"{sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}"
            f" (first and last {len(first)} of {len(rewards)} steps)",
        )
    ]


def _early_end(record: Mapping[str, object]) -> list[Row]:
    if "stop_reason" not in record:
        return []
    return [
        Row("training ended early", f"after {record['stopped_at']} steps, {record['stop_reason']}")
    ]


def _accuracy(metrics: Mapping[str, object]) -> list[Row]:
    test = cast("Mapping[str, Mapping[str, Mapping[str, float]]]", metrics["test"])
    before, after = test["warmstart"], test["policy"]
    return [
        Row(f"accuracy, {name}", f"{_interval(before[how])} -> {_interval(after[how])}")
        for how, name in _SCORES.items()
        if how in before and how in after
    ]


def _interval(block: Mapping[str, float]) -> str:
    return f"{block['accuracy']:.3f} [{block['accuracy_low']:.3f}, {block['accuracy_high']:.3f}]"


def _registered(record: Mapping[str, object]) -> list[Row]:
    alias = f" @{record['alias']}" if record.get("alias") else ""
    return [Row("registered model", f"{record['name']} version {record['version']}{alias}")]


def plan_table(plan: Plan) -> str:
    """Markdown: which stages would run and why, and how long they took the last time."""
    lines = ["| stage | | last time | why |", "|---|---|---|---|"]
    for stage in plan.stages:
        seconds = "" if stage.seconds is None else duration(stage.seconds)
        cost = "" if stage.cost is None else f", {stage.cost:.2f}"
        reasons = "<br>".join(_reason(reason) for reason in stage.reasons[:_MAX_REASONS])
        if len(stage.reasons) > _MAX_REASONS:
            reasons += f"<br>and {len(stage.reasons) - _MAX_REASONS} more"
        lines.append(f"| {stage.name} | {stage.state} | {seconds}{cost} | {reasons} |")
    if plan.seconds is not None:
        lines += ["", f"As in the last runs: {duration(plan.seconds)}."]
    return "\n".join(lines)


def _reason(reason: Reason) -> str:
    # between backticks, so that the underscores of __init__.py stay underscores
    detail = f" {reason.detail}" if reason.detail else ""
    return f"{reason.kind} `{reason.what}`{detail.replace('|', '/')}"


def stage_table(reports: Sequence[StageReport]) -> str:
    """Markdown: what became of each stage."""
    lines = ["| stage | result | seconds |", "|---|---|---|"]
    lines.extend(f"| {r.stage} | {r.result} | {r.seconds:.1f} |" for r in reports)
    return "\n".join(lines)


def text_table(rows: Sequence[Row]) -> str:
    """The summary for a terminal."""
    width = max((len(row.what) for row in rows), default=0)
    return "\n".join(f"  {row.what:<{width}}  {row.value}" for row in rows)
