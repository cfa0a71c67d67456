"""What a report shows, read from a run directory; every part may be absent."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn import layout, params, trajectories
from polyturn.params import Params, ParamsError
from polyturn.tracking import environment, lineage
from polyturn.tracking.environment import Environment
from polyturn.trajectories import TrajectoryEntry, TrajectoryFileError

logger = logging.getLogger(__name__)

STAGES = ("fetch", "images", "model", "warmstart", "train", "evaluate", "register")
POLICIES = ("warmstart", "policy")
_ACCURACY = ("accuracy", "accuracy_low", "accuracy_high")
MODES = ("sampled", "greedy", "training_env")

Scores = Mapping[str, float]  # one leaf block of metrics.json
Curve = Mapping[str, Sequence[float | None]]  # column of train_curve.csv -> one value per step
Tries = Mapping[str, Sequence[bool]]  # "policy/sampled" -> which tries at a problem were correct


@dataclass(frozen=True)
class StageTime:
    """The last run of a stage."""

    stage: str
    seconds: float
    run_id: str


@dataclass(frozen=True)
class DataCounts:
    """Rows of one split: kept, and set aside by reason."""

    split: str
    kept: int
    set_aside: Mapping[str, int]


@dataclass(frozen=True)
class Exhibits:
    """Trajectories to show: before training and after it, with a word on where they come from."""

    before: Sequence[TrajectoryEntry]
    after: Sequence[TrajectoryEntry]
    source: str


@dataclass(frozen=True)
class RunData:
    """Everything that was found below `root`."""

    root: Path
    params: Params | None
    num_problems: int | None  # of the test split
    scores: Mapping[tuple[str, str], Scores]  # (warmstart | policy, sampled | greedy) -> block
    tries: Sequence[Tries]  # one per test problem
    curve: Curve
    exhibits: Exhibits
    counts: Sequence[DataCounts]
    times: Sequence[StageTime]
    train_run: Mapping[str, object]  # artifacts/train_run.json
    registered: Mapping[str, object] | None
    digests: Mapping[str, str]  # path -> md5 in dvc.lock
    environment: Environment


def read_run(root: Path) -> RunData:
    """Read what there is; a file that is absent or unreadable leaves its part empty, with a log line."""
    test = _section(_read_json(root / layout.METRICS), "test")
    count = test.get("num_problems")
    return RunData(
        root=root,
        params=_read_params(root / layout.PARAMS),
        num_problems=count if isinstance(count, int) else None,
        scores=_scores(test),
        tries=[
            cast("Tries", row.get("correct", {}))
            for row in _read_lines(root / layout.EVALUATION / "results.jsonl")
        ],
        curve=_read_curve(root / layout.CURVE),
        exhibits=_read_exhibits(root),
        counts=_read_counts(root),
        times=_read_times(root / layout.STATE / "timings.jsonl"),
        train_run=_read_json(root / layout.TRAIN_RUN),
        registered=read_registered(root),
        digests=_read_digests(root / layout.DVC_LOCK),
        environment=environment.capture(root),
    )


def read_registered(root: Path) -> Mapping[str, object] | None:
    """The record of the last registration, which has a name and a version; None where there is none."""
    path = root / layout.REGISTERED
    found = _read_json(path)
    missing = [key for key in ("name", "version") if not isinstance(found.get(key), str | int)]
    if found and missing:
        logger.warning("%s is left out of the report: it has no %s", path, ", ".join(missing))
    return found if found and not missing else None


def picture_directories(root: Path) -> list[Path]:
    """Where PNGs named by hash lie."""
    return [
        root / layout.EVALUATION / "png",
        root / layout.TRAJECTORIES / "png",
        root / layout.IMAGES / "png",
    ]


def _section(tree: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = tree.get(key)
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is left out of the report: %s", path, error)
        return {}
    if not isinstance(content, dict):
        logger.warning("%s is left out of the report: it is no JSON object", path)
        return {}
    return cast("Mapping[str, object]", content)


def _read_lines(path: Path) -> list[Mapping[str, object]]:
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        logger.warning("%s is left out of the report: %s", path, error)
        return []
    if not all(isinstance(row, dict) for row in rows):
        logger.warning("%s is left out of the report: a line is no JSON object", path)
        return []
    return rows


def _read_params(path: Path) -> Params | None:
    try:
        return params.load(path)
    except ParamsError as error:
        logger.warning("the report shows no params: %s", error)
        return None


def _scores(test: Mapping[str, object]) -> dict[tuple[str, str], Scores]:
    found: dict[tuple[str, str], Scores] = {}
    for policy in POLICIES:
        for mode in MODES:
            block = _section(_section(test, policy), mode)
            numbers = {key: value for key, value in block.items() if _is_number(value)}
            if numbers.keys() >= set(_ACCURACY):
                found[(policy, mode)] = cast("Scores", numbers)
            elif block:
                needed = ", ".join(_ACCURACY)
                logger.warning(
                    "%s test.%s.%s is left out of the report: it needs the numbers %s",
                    layout.METRICS,
                    policy,
                    mode,
                    needed,
                )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_curve(path: Path) -> Curve:
    if not path.exists():
        return {}
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        names = reader.fieldnames or ()
        return {name: [float(row[name]) if row[name] else None for row in rows] for name in names}
    except (OSError, ValueError, csv.Error) as error:
        logger.warning("%s is left out of the report: %s", path, error)
        return {}


def _read_exhibits(root: Path) -> Exhibits:
    """Evaluation trajectories (step 0: warm start, 1: policy), else those of the first and last training step."""
    scored = _read_records(root / layout.EVALUATION / "trajectories.jsonl.gz")
    before = [record for record in scored if record["step"] == 0]
    after = [record for record in scored if record["step"] > 0]
    if before and after:
        return Exhibits(before, after, "held-out problems")
    directory = root / layout.TRAJECTORIES
    steps = trajectories.list_steps(directory)
    if len(steps) < 2:
        return Exhibits((), scored, "held-out problems")
    first, last = (
        _read_records(trajectories.step_path(directory, s)) for s in (steps[0], steps[-1])
    )
    return Exhibits(first, last, f"training problems of steps {steps[0]} and {steps[-1]}")


def _read_records(path: Path) -> list[TrajectoryEntry]:
    if not path.exists():
        return []
    try:
        return trajectories.read_records(path)
    except TrajectoryFileError as error:
        logger.warning("left out of the report: %s", error)
        return []


def _read_counts(root: Path) -> list[DataCounts]:
    kept = _count_splits(_read_lines(root / layout.PROBLEMS / "problems.jsonl"))
    reasons: dict[str, Counter[str]] = {}
    for directory in (layout.RAW, layout.IMAGES, layout.PROBLEMS):
        for row in _read_lines(root / directory / "quarantine.jsonl"):
            reasons.setdefault(str(row.get("split")), Counter())[str(row.get("reason"))] += 1
    splits = [s for s in ("train", "validation", "test") if s in kept or s in reasons]
    splits += sorted((set(kept) | set(reasons)) - set(splits))
    return [
        DataCounts(split, kept.get(split, 0), dict(reasons.get(split, Counter()).most_common()))
        for split in splits
    ]


def _count_splits(rows: Iterable[Mapping[str, object]]) -> Counter[str]:
    return Counter(str(row.get("split")) for row in rows)


def _read_times(path: Path) -> list[StageTime]:
    last = {
        str(row["stage"]): StageTime(
            str(row["stage"]), float(cast("float", row["seconds"])), str(row.get("run_id", ""))
        )
        for row in _read_lines(path)
        if "stage" in row and _is_number(row.get("seconds"))
    }
    known = [last[stage] for stage in STAGES if stage in last]
    return known + [time for stage, time in last.items() if stage not in STAGES]


def _read_digests(path: Path) -> Mapping[str, str]:
    try:
        return lineage.lock_digests(path)
    except ValueError as error:
        logger.warning("the report shows no data digests: %s", error)
        return {}
