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
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.two_gpu_learners_work import (
    FULL,
    LARGE_EPS,
    LR,
    ONE,
    QUICK,
    TWO,
    USUAL_EPS,
    Case,
    Run,
    Tensors,
)

ROOT = Path(__file__).resolve().parent.parent
FLOAT32_LIMIT = 1e-4  # relative, of loss and gradient norm
WEIGHTS_LIMIT = 1e-2  # learning rates
NOISE_FACTOR = 2.0
NEARNESS = 1.25  # of the distance from float32 to that of one GPU in bfloat16
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Gap:
    """How far a run is from another one.

    `loss`, `grad_norm`: of the first update, relative; `last_loss` of the last. `way`: norm of the difference over
    norm of the way, all weights together, and `worst_way` of the worst tensor; `mean_weight` and `largest_weight` in
    learning rates, root mean square and largest.
    """

    loss: float
    grad_norm: float
    last_loss: float
    way: float
    cosine: float
    mean_weight: float
    worst_way: float
    worst_tensor: str
    largest_weight: float


TO_FLOAT32 = "bf16-fp32"  # a bfloat16 run held against the float32 run of one process
NUMBERS = ("loss", "grad_norm", "last_loss", "way", "mean_weight", "worst_way", "largest_weight")


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
        runs = read_runs(directory)
        result = compare(runs, directory, device)
    size = QUICK if arguments.quick else FULL
    result |= {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backend": "nccl" if device == "cuda" else "gloo",
        "torch": torch.__version__,
        "shape": asdict(size.shape),
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
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    plain = {
        name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK"}
    }
    plain["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environments = [plain]
    environments += [
        {**plain, **pair, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)
    ]
    processes = [subprocess.Popen(command, cwd=ROOT, env=one) for one in environments]
    until = time.monotonic() + PATIENCE_S
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        raise RuntimeError(f"exit codes of the single process and of ranks 0 and 1: {codes}")


def read_runs(directory: Path) -> dict[Case, Run]:
    """What both kinds of processes have run."""
    runs = [
        Run(**{**told, "case": Case(**told["case"])})
        for name in ("one", "two")
        for told in json.loads((directory / f"{name}.json").read_text())
    ]
    return {run.case: run for run in runs}


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


def float32_agrees(usual: Gap, large: Gap) -> bool:
    """Loss, norm, and the ways with a large eps to 1e-4; with the usual one the weights on average."""
    return (
        max(usual.loss, usual.grad_norm, large.way) <= FLOAT32_LIMIT
        and usual.mean_weight <= WEIGHTS_LIMIT
    )


def bfloat16_agrees(found: Gap, noise: Gap) -> bool:
    """Loss, norm and the way of the weights within NOISE_FACTOR times the noise."""
    return all(
        getattr(found, name) <= NOISE_FACTOR * getattr(noise, name)
        for name in ("loss", "grad_norm", "way")
    )


def gap_of(run: Run, ways: Tensors, other: Run, other_ways: Tensors) -> Gap:
    """How far `run` is from `other`; a tensor that has not moved there is 1 away where it moved here.

    One weight that went 3 and 4 in one run and 3 and 5 in the other: the way is 1 / sqrt(34).
    """
    if ways.keys() != other_ways.keys():
        raise ValueError(f"not the same tensors: {sorted(ways.keys() ^ other_ways.keys())[:4]}")
    apart = own = theirs = product = largest = 0.0
    worst, worst_tensor, count = 0.0, "", 0
    for name, way in ways.items():
        mine, wanted = way.double(), other_ways[name].double()
        difference = mine - wanted
        square = float(difference.square().sum())
        own_square, wanted_square = float(mine.square().sum()), float(wanted.square().sum())
        apart += square
        own += own_square
        theirs += wanted_square
        product += float((mine * wanted).sum())
        count += way.numel()
        largest = max(largest, float(difference.abs().max()))
        relative = math.sqrt(square / max(wanted_square, own_square, 1e-300))
        if relative >= worst:
            worst, worst_tensor = relative, name
    return Gap(
        loss=relative_gap(run.losses[0], other.losses[0]),
        grad_norm=relative_gap(run.norms[0], other.norms[0]),
        last_loss=relative_gap(run.losses[-1], other.losses[-1]),
        way=math.sqrt(apart / theirs),
        cosine=product / math.sqrt(own * theirs),
        mean_weight=math.sqrt(apart / count) / LR,
        worst_way=worst,
        worst_tensor=worst_tensor,
        largest_weight=largest / LR,
    )


def relative_gap(one: float, other: float) -> float:
    """Difference over the size of the second."""
    return abs(one - other) / abs(other)


def rounded(gap: Gap) -> dict[str, object]:
    """Three digits, of the cosine ten."""
    told = {name: float(f"{getattr(gap, name):.3g}") for name in NUMBERS}
    return {**told, "cosine": round(gap.cosine, 10), "worst_tensor": gap.worst_tensor}


if __name__ == "__main__":
    main()
