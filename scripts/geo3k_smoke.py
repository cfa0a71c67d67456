"""Run the pipeline on real Geometry3K problems in a worktree, and check that all counts add up (`make geo3k-smoke`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment, layout, params, trajectories  # noqa: E402 - see services.py
from polyturn.params import Params  # noqa: E402
from polyturn.pipeline import checkout, workspace  # noqa: E402 - see services.py
from polyturn.types import Status  # noqa: E402

NAME = "geo3k-smoke"
RECIPE = "geo3k_smoke"


@dataclass(frozen=True)
class Check:
    """One equation between counts."""

    what: str
    left: int
    right: int

    @property
    def holds(self) -> bool:
        """Whether it adds up."""
        return self.left == self.right


def checks(root: Path, source: Path) -> Iterator[Check]:
    """All equations over the files of a finished run in `root` on the dataset directory `source`."""
    settings = params.load(root / layout.PARAMS)
    num_rows = sum(_lines(path) for path in source.glob("*.jsonl"))
    num_raw = _lines(root / layout.RAW / "problems.jsonl")
    num_images = _lines(root / layout.IMAGES / "problems.jsonl")
    num_problems = _lines(root / layout.PROBLEMS / "problems.jsonl")
    for stage, rows, kept, directory in (
        ("fetch", num_rows, num_raw, layout.RAW),
        ("images", num_raw, num_images, layout.IMAGES),
        ("model", num_images, num_problems, layout.PROBLEMS),
    ):
        set_aside = _set_aside(root / directory / "quarantine.jsonl", stage)
        yield Check(
            f"{stage}: rows in = kept {kept} + set aside {set_aside}", rows, kept + set_aside
        )
    yield from _training_checks(root, settings)
    num_test = sum(
        row["split"] == "test" for row in _rows(root / layout.PROBLEMS / "problems.jsonl")
    )
    yield Check(
        "evaluate: test problems = results",
        num_test,
        _lines(root / layout.EVALUATION / "results.jsonl"),
    )
    metrics = json.loads((root / layout.METRICS).read_text())
    yield Check("evaluate: test problems = num_problems", num_test, metrics["test"]["num_problems"])


def _training_checks(root: Path, settings: Params) -> Iterator[Check]:
    steps = trajectories.list_steps(root / layout.TRAJECTORIES)
    yield Check("train: steps asked for = files of trajectories", settings.train.steps, len(steps))
    per_step = settings.rollout.prompts_per_step * settings.rollout.group_size
    rewarded, with_reward, total = 0, 0, 0
    for step in steps:
        records = trajectories.read_step(root / layout.TRAJECTORIES, step)
        total += len(records)
        rewarded += sum(Status(record["status"]).is_rewarded for record in records)
        with_reward += sum(record["reward"] is not None for record in records)
    yield Check("train: steps x prompts x siblings = trajectories", len(steps) * per_step, total)
    yield Check("train: trajectories that finished = graded ones", rewarded, with_reward)


def _rows(path: Path) -> Iterator[dict[str, object]]:
    with path.open() as lines:
        yield from (json.loads(line) for line in lines)


def _lines(path: Path) -> int:
    return sum(1 for _ in _rows(path))


def _set_aside(path: Path, stage: str) -> int:
    return sum(row["stage"] == stage for row in _rows(path)) if path.is_file() else 0


def run(source: Path) -> Path:
    """Run the pipeline in a fresh worktree; return its path.

    Raises:
        ValueError: the dataset is not there, the checkout has uncommitted edits, or the pipeline failed.
    """
    if not list(source.glob("*.jsonl")):
        raise ValueError(
            f"DATA={source} holds no .jsonl file; name a directory with problems.jsonl and images/"
        )
    overrides = {"data.path": str(source.resolve())}
    plan = workspace.compose(ROOT, recipe=RECIPE, overrides=overrides)
    old = ROOT / checkout.WORKTREES / NAME
    if old.exists():
        workspace.remove(ROOT, old)
    root = workspace.create(ROOT, NAME, plan.changes)
    code = subprocess.run(
        [sys.executable, "-m", "flows.pipeline"], cwd=root, check=False
    ).returncode
    if code:
        raise ValueError(f"the pipeline failed (exit code {code}); its worktree is kept: {root}")
    return root


def main() -> int:
    """Run, check, and keep the report."""
    environment.apply(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    source = Path(sys.argv[1])
    try:
        root = run(source)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = list(checks(root, source))
    for check in found:
        print(f"{'ok ' if check.holds else 'BAD'} {check.what}: {check.left} = {check.right}")
    if not all(check.holds for check in found):
        print(f"error: counts do not add up; the worktree is kept: {root}", file=sys.stderr)
        return 1
    report = ROOT / "runs" / NAME / layout.REPORT.name
    report.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / layout.REPORT, report)
    workspace.remove(ROOT, root)
    print(f"report: {report.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
