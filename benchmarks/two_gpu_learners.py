"""The same batch on one GPU and on two, FSDP2 and Megatron-Core, float32 and bfloat16: one table of how far they are apart.

Loss and gradient norm of the first update, and the ways that the weights have gone after five, against one GPU with
the same learner and precision. Float32 has to agree to 1e-4: loss, norm, and the ways with an eps of 1e-6. AdamW's
usual eps of 1e-8 makes steps of gradients that are 0 but for rounding (key biases); there the root mean square over all
weights is held to a hundredth of a learning rate, as in tests/unit/learner/test_megatron_equals_fsdp.py.

Bfloat16 has to agree within twice the largest difference between any two single-GPU runs (either learner, other
micro-batches, other order of samples). Tensor parallelism rounds partial sums that one GPU does not have; whether a
layout is as near to float32 as one GPU is in bfloat16 (ways at most 1.25 times as far) is therefore told too.

Starts its own processes: two ranks, and one beside them on the last GPU. `--device cpu` takes gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.ranks import environments, run_together
from benchmarks.two_gpu_learners_cases import (
    LARGE_EPS,
    LR,
    ONE,
    TWO,
    USUAL_EPS,
    Case,
    Run,
    Tensors,
)
from benchmarks.two_gpu_learners_gaps import (
    FLOAT32_LIMIT,
    NOISE_FACTOR,
    NUMBERS,
    WEIGHTS_LIMIT,
    Gap,
    bfloat16_agrees,
    float32_agrees,
    gap_of,
    rounded,
)

ROOT = Path(__file__).resolve().parent.parent
NEARNESS = 1.25  # of the distance from float32 to that of one GPU in bfloat16
PATIENCE_S = 300.0
TO_FLOAT32 = "bf16-fp32"  # a bfloat16 run held against the float32 run of one process


def main() -> None:
    """Run all layouts, print the table and RESULT, write --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model, to try the script")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/two_gpu_learners.json"
    )
    arguments = parser.parse_args()
    device = device_of(arguments.device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        start_all(directory, device, is_quick=arguments.quick)
        shape, runs = read_runs(directory)
        result = compare(runs, directory, device)
    result |= {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backend": "nccl" if device == "cuda" else "gloo",
        "torch": torch.__version__,
        "shape": shape,
        "lr": LR,
        "seconds": round(time.perf_counter() - started, 1),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("RESULT", json.dumps(result))


def device_of(asked: str) -> str:
    """cpu or cuda.

    Raises:
        ValueError: there are not two GPUs.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and torch.cuda.device_count() < 2:
        raise ValueError(
            f"two ranks need a GPU each, torch sees {torch.cuda.device_count()}; take --device cpu"
        )
    return asked


# -- processes -----------------------------------------------------------------------------------------------


def start_all(directory: Path, device: str, *, is_quick: bool) -> None:
    """Run the two ranks and the single process, side by side.

    Raises:
        RuntimeError: one of them failed; its output stands above.
    """
    command = [sys.executable, "-m", "benchmarks.two_gpu_learners_work"]
    command += ["--directory", str(directory), "--device", device, *(["--quick"] * is_quick)]
    (alone,) = environments(1)
    codes = run_together([(command, one) for one in (alone, *environments(2))], PATIENCE_S)
    if any(codes):
        raise RuntimeError(f"exit codes of the single process and of ranks 0 and 1: {codes}")


def read_runs(directory: Path) -> tuple[dict[str, object], dict[Case, Run]]:
    """The model's shape, and what both kinds of processes have run."""
    told = [json.loads((directory / f"{name}.json").read_text()) for name in ("one", "two")]
    runs = [
        Run(**{**run, "case": Case(**run["case"])}) for written in told for run in written["runs"]
    ]
    return told[0]["shape"], {run.case: run for run in runs}


# -- comparison ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table; `is_within` None where nothing is demanded."""

    precision: str
    name: str
    gap: Gap
    is_within: bool | None = None

    def line(self) -> str:
        """As it is printed."""
        cells = [
            f"{self.gap.loss:10.1e}{self.gap.grad_norm:10.1e}{self.gap.way:10.1e}{self.gap.cosine:12.7f}",
            f"{self.gap.mean_weight:10.1e}{self.gap.worst_way:10.1e}{self.gap.largest_weight:10.1e}",
        ]
        told = {None: "", True: "  within", False: "  NOT WITHIN"}[self.is_within]
        return f"{self.precision:9} {self.name:30}{''.join(cells)}{told}"


HEADER = (
    f"{'precision':9} {'run':30}{'loss':>10}{'norm':>10}{'way':>10}{'cosine':>12}"
    f"{'rms/lr':>10}{'worst way':>10}{'largest/lr':>11}"
)


@dataclass(frozen=True)
class Comparison:
    """The runs of all processes, and where the ways of their weights lie."""

    runs: Mapping[Case, Run]
    directory: Path
    device: str
    _ways: dict[Case, Tensors] = field(default_factory=dict)

    def gap(self, one: Case, other: Case) -> Gap:
        """How far `one` is from `other`."""
        for case in {one, other} - self._ways.keys():
            path = self.directory / f"{case.key}.pt"
            self._ways[case] = torch.load(path, map_location=self.device)
        return gap_of(self.runs[one], self._ways[one], self.runs[other], self._ways[other])

    def noise(self) -> Gap:
        """The largest differences between any two bfloat16 runs of one process."""
        names = [layout.name for layout in ONE]
        cases = [c for c in self.runs if c.layout in names and c.precision == "bfloat16"]
        gaps = [self.gap(one, other) for one, other in itertools.combinations(cases, 2)]
        worst = max(gaps, key=lambda gap: gap.worst_way)
        return replace(
            worst,
            cosine=min(gap.cosine for gap in gaps),
            **{name: max(getattr(gap, name) for gap in gaps) for name in NUMBERS},
        )

    def rows(self) -> Iterator[Row]:
        """The table."""
        alone = {layout.backend: layout.name for layout in ONE}
        for layout in TWO:
            usual, large = (
                self.gap(*(Case(n, "float32", eps) for n in (layout.name, alone[layout.backend])))
                for eps in (USUAL_EPS, LARGE_EPS)
            )
            yield Row("float32", layout.name, usual, float32_agrees(usual, large))
            yield Row("float32", f"{layout.name}, eps {LARGE_EPS:g}", large)
        noise = self.noise()
        yield Row("bfloat16", "between single-GPU runs", noise)
        for layout in TWO:
            found = self.gap(bfloat16(layout.name), bfloat16(alone[layout.backend]))
            yield Row("bfloat16", layout.name, found, bfloat16_agrees(found, noise))
        exact = Case(ONE[0].name, "float32", USUAL_EPS)
        away = {layout.name: self.gap(bfloat16(layout.name), exact) for layout in (*ONE, *TWO)}
        for layout in (*ONE, *TWO):
            gap, one = away[layout.name], away[alone[layout.backend]]
            is_near = gap.way <= NEARNESS * one.way if layout in TWO else None
            yield Row(TO_FLOAT32, layout.name, gap, is_near)
        for precision in ("float32", "bfloat16"):
            fsdp, megatron = (Case(layout.name, precision, USUAL_EPS) for layout in ONE)
            yield Row(precision, "Megatron x1 from FSDP x1", self.gap(megatron, fsdp))


def compare(runs: Mapping[Case, Run], directory: Path, device: str) -> dict[str, object]:
    """Print the table of every layout against one process of its learner, and return it."""
    for layout in (*ONE, *TWO):
        for precision in ("float32", "bfloat16"):
            run = runs[Case(layout.name, precision, USUAL_EPS)]
            print(
                f"{layout.name:16} {precision}: loss {run.losses[0]:.7f}, norm {run.norms[0]:.6f}"
            )
    print(HEADER)
    rows: list[Row] = []
    for row in Comparison(runs, directory, device).rows():
        print(row.line(), flush=True)
        rows.append(row)
    return {
        "float32_within": all(row.is_within for row in demanded(rows, "float32")),
        "bfloat16_within_noise": all(row.is_within for row in demanded(rows, "bfloat16")),
        "bfloat16_as_near_to_float32": all(row.is_within for row in demanded(rows, TO_FLOAT32)),
        "rows": [
            {"precision": row.precision, "run": row.name, "is_within": row.is_within}
            | rounded(row.gap)
            for row in rows
        ],
        "runs": {
            run.case.key: {"losses": run.losses, "norms": run.norms, "seconds": run.seconds}
            for run in runs.values()
        },
        "limits": {
            "float32": FLOAT32_LIMIT,
            "weights_lr": WEIGHTS_LIMIT,
            "noise_factor": NOISE_FACTOR,
            "nearness": NEARNESS,
        },
    }


def bfloat16(layout: str) -> Case:
    """The run of a layout that is compared."""
    return Case(layout, "bfloat16", USUAL_EPS)


def demanded(rows: Sequence[Row], precision: str) -> list[Row]:
    """The lines that have to be within."""
    return [row for row in rows if row.precision == precision and row.is_within is not None]


if __name__ == "__main__":
    main()
