"""Demo-size checks (`make test-full`): same commit and seed, twice from scratch, same bytes; then several seeds.

Prints one line per run and writes .polyturn/reproducible.json. About ten minutes a run on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment, layout  # noqa: E402 - the checkout need not be installed
from polyturn.pipeline import checkout, workspace  # noqa: E402 - the checkout need not be installed

STAGES = ("fetch", "images", "model", "warmstart", "train", "evaluate", "register")
MAX_BEFORE, MIN_AFTER = 0.35, 0.70  # sampled accuracy on held-out problems


@dataclass(frozen=True)
class Run:
    """One run from scratch: digests of what it wrote, sampled accuracy with 95% interval, seconds."""

    seed: int
    metrics_sha256: str
    weights_sha256: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    seconds: float

    @property
    def has_learnt(self) -> bool:
        """Whether accuracy went from low to high with the intervals apart."""
        return (
            self.before[0] <= MAX_BEFORE
            and self.after[0] >= MIN_AFTER
            and self.before[2] < self.after[1]
        )


def run_from_scratch(name: str, *, seed: int, recipe: str | None) -> Run:
    """Run all stages in a fresh worktree without run cache and without resuming.

    Raises:
        ValueError: a stage failed, or its command did not run.
    """
    overrides = {"seed": seed, "train.resume": "never", "train.work_uri": ""}
    plan = workspace.compose(ROOT, recipe=recipe, overrides=overrides)
    path = ROOT / checkout.WORKTREES / name
    if path.exists():
        workspace.remove(ROOT, path)
    workspace.create(ROOT, name, plan.changes)
    started = time.monotonic()
    command = [sys.executable, "-m", "dvc", "repro", "--force", "--no-run-cache"]
    result = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    log = ROOT / layout.STATE / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(result.stdout + result.stderr)
    silent = [stage for stage in STAGES if f"Running stage '{stage}'" not in result.stdout]
    if result.returncode or silent:
        raise ValueError(f"run {name} failed (did not run: {silent}); see {log}, worktree {path}")
    run = _read(path, seed=seed, seconds=time.monotonic() - started)
    kept = ROOT / "runs" / name
    kept.mkdir(parents=True, exist_ok=True)
    for file in (layout.REPORT, layout.CURVE, layout.METRICS, layout.PARAMS):
        shutil.copy(path / file, kept)
    workspace.remove(ROOT, path)
    return run


def _read(path: Path, *, seed: int, seconds: float) -> Run:
    metrics = (path / layout.METRICS).read_bytes()
    test = json.loads(metrics)["test"]

    def accuracy(policy: str) -> tuple[float, float, float]:
        block = test[policy]["sampled"]
        return block["accuracy"], block["accuracy_low"], block["accuracy_high"]

    digest = hashlib.sha256()
    for file in sorted((path / layout.POLICY).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return Run(
        seed=seed,
        metrics_sha256=hashlib.sha256(metrics).hexdigest(),
        weights_sha256=digest.hexdigest(),
        before=accuracy("warmstart"),
        after=accuracy("policy"),
        seconds=round(seconds, 1),
    )


def _show(run: Run) -> str:
    before, after = (f"{a:.3f} [{low:.3f}, {high:.3f}]" for a, low, high in (run.before, run.after))
    return (
        f"seed {run.seed}: accuracy {before} -> {after}, {run.seconds:.0f} s, "
        f"metrics {run.metrics_sha256[:12]}, weights {run.weights_sha256[:12]}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", help="an overlay of recipes/; accuracy is then not judged")
    chosen = parser.parse_args(arguments)
    environment.apply(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    runs: list[Run] = []
    failures: list[str] = []
    try:
        for name, seed in [("again", chosen.seeds[0]), *((f"seed-{s}", s) for s in chosen.seeds)]:
            runs.append(run_from_scratch(name, seed=seed, recipe=chosen.recipe))
            print(_show(runs[-1]), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    again, first = runs[0], runs[1]
    if (again.metrics_sha256, again.weights_sha256) != (first.metrics_sha256, first.weights_sha256):
        failures.append(f"seed {first.seed}: two runs from scratch differ")
    if chosen.recipe is None:
        failures += [
            f"seed {run.seed}: has not learnt as promised" for run in runs if not run.has_learnt
        ]
    path = ROOT / layout.STATE / "reproducible.json"
    path.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
