"""Does the gap between sampler and learner drift? Reads a training run's metrics from MLflow and prints a table.

    python scripts/gap_drift.py [RUN_ID]

Without RUN_ID: the one of artifacts/train_run.json. For each gap metric (train/logprob_gap/..., docs/gpu.md): mean,
first and last quarter of the steps, slope over 100 steps with its standard error, and whether the slope is more than
two of them from 0. Exit code 1 if the mean gap drifts upwards.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import layout, params  # noqa: E402
from polyturn.tracking import histories, store  # noqa: E402

PREFIX = "train/logprob_gap/"


@dataclass(frozen=True)
class Trend:
    """A metric over steps: its mean, means of the first and last quarter, slope of 100 steps and its standard error."""

    mean: float
    first: float
    last: float
    slope: float
    error: float

    @property
    def drifts(self) -> bool:
        """Whether the slope is more than two standard errors from 0."""
        return abs(self.slope) > 2 * self.error


def trend(steps: Sequence[int], values: Sequence[float]) -> Trend:
    """Least squares over steps; a constant has slope 0 and error 0."""
    x, y = np.array(steps, dtype=float), np.array(values, dtype=float)
    quarter = max(1, len(y) // 4)
    centred = x - x.mean()
    spread = float((centred**2).sum())
    if len(y) < 3 or spread == 0:
        return Trend(float(y.mean()), float(y[0]), float(y[-1]), 0.0, math.inf)
    slope = float((centred * y).sum()) / spread
    rest = y - y.mean() - slope * centred
    error = math.sqrt(float((rest**2).sum()) / (len(y) - 2) / spread)
    return Trend(
        float(y.mean()),
        float(y[:quarter].mean()),
        float(y[-quarter:].mean()),
        100 * slope,
        100 * error,
    )


def main() -> None:
    """Print the table of a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run_id", nargs="?")
    options = parser.parse_args()
    run_id = options.run_id or json.loads(layout.TRAIN_RUN.read_text())["run_id"]
    opened = store.connect(params.load().tracking, Path.cwd())
    names = [name for name in histories.names(opened, run_id) if name.startswith(PREFIX)]
    if not names:
        raise SystemExit(f"run {run_id} has no metrics {PREFIX}...")
    print(f"{'metric':<20}{'mean':>10}{'first':>10}{'last':>10}{'per 100':>11}{'error':>10}")
    found: dict[str, Trend] = {}
    for name, points in histories.read(opened, run_id, names).items():
        row = trend(list(points), list(points.values()))
        found[name.removeprefix(PREFIX)] = row
        print(
            f"{name.removeprefix(PREFIX):<20}{row.mean:>10.5f}{row.first:>10.5f}{row.last:>10.5f}"
            f"{row.slope:>+11.5f}{row.error:>10.5f}{'  drifts' if row.drifts else ''}"
        )
    print("RESULT " + json.dumps({name: row.__dict__ for name, row in found.items()}))
    sys.exit(1 if found["mean"].drifts and found["mean"].slope > 0 else 0)


if __name__ == "__main__":
    main()
