"""The demo trained by FSDP and by Megatron-Core with tensor_parallel 2 (`make test-full`), seed by seed.

Both learners go on from the same warm start. Their intervals of sampled accuracy on held-out problems have to overlap,
and both have to have learnt. Prints one line per seed and writes .polyturn/learners.json; ten minutes a run on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
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

LEARNERS: dict[str, dict[str, object]] = {
    "fsdp": {"backend": "fsdp", "num_processes": 1, "tensor_parallel": 1},
    "megatron": {"backend": "megatron", "num_processes": 2, "tensor_parallel": 2},
}


@dataclass(frozen=True)
class Result:
    """Sampled accuracy with its 95% interval before and after training, and how long it took."""

    learner: str
    seed: int
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    seconds: float

    @property
    def has_learnt(self) -> bool:
        """Whether the intervals before and after lie apart."""
        return self.before[2] < self.after[1]

    def overlaps(self, other: Result) -> bool:
        """Whether two trained policies may be equally good."""
        return self.after[1] <= other.after[2] and other.after[1] <= self.after[2]


def train_with_each(seed: int, *, recipe: str | None) -> list[Result]:
    """Run the pipeline in a worktree of its own, then its training again with the other learner.

    Raises:
        ValueError: a stage failed.
    """
    overrides = {"seed": seed, "train.resume": "never", "train.work_uri": ""}
    plan = workspace.compose(ROOT, recipe=recipe, overrides=overrides)
    name = f"learners-{seed}"
    path = ROOT / checkout.WORKTREES / name
    if path.exists():
        workspace.remove(ROOT, path)
    workspace.create(ROOT, name, plan.changes)
    results: list[Result] = []
    for learner, params in LEARNERS.items():
        workspace.write_params(path, {"learner": params})
        started = time.monotonic()
        command = [sys.executable, "-m", "dvc", "repro", "--no-run-cache"]
        result = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
        log = ROOT / layout.STATE / "logs" / f"{name}-{learner}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(result.stdout + result.stderr)
        if result.returncode or "Running stage 'train'" not in result.stdout:
            raise ValueError(f"seed {seed} with {learner} failed; see {log}, worktree {path}")
        seconds = round(time.monotonic() - started, 1)
        before, after = (accuracy_of(path, policy) for policy in ("warmstart", "policy"))
        results.append(Result(learner, seed, before, after, seconds))
    workspace.remove(ROOT, path)
    return results


def accuracy_of(path: Path, policy: str) -> tuple[float, float, float]:
    """Accuracy, lower and upper bound of a policy in a checkout's metrics."""
    block = json.loads((path / layout.METRICS).read_text())["test"][policy]["sampled"]
    return block["accuracy"], block["accuracy_low"], block["accuracy_high"]


def line(results: Sequence[Result]) -> str:
    """What is told of a seed."""
    told = [
        f"{r.learner} {r.before[0]:.3f} -> {r.after[0]:.3f} [{r.after[1]:.3f}, {r.after[2]:.3f}], {r.seconds:.0f} s"
        for r in results
    ]
    return f"seed {results[0].seed}: {'; '.join(told)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--recipe", help="an overlay of recipes/; whether it has learnt is then not judged"
    )
    chosen = parser.parse_args(arguments)
    environment.apply(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    everything: list[Result] = []
    failures: list[str] = []
    for seed in chosen.seeds:
        try:
            fsdp, megatron = results = train_with_each(seed, recipe=chosen.recipe)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(line(results), flush=True)
        everything += results
        if not fsdp.overlaps(megatron):
            failures.append(f"seed {seed}: the learners' intervals lie apart")
        if chosen.recipe is None:
            failures += [
                f"seed {seed}: {r.learner} has not learnt" for r in results if not r.has_learnt
            ]
    path = ROOT / layout.STATE / "learners.json"
    path.write_text(json.dumps([asdict(result) for result in everything], indent=2) + "\n")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
