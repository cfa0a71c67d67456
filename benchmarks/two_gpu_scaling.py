"""A training step at the Qwen3-VL-2B shape on one GPU and on two: speedup of each layout of ranks, split against replicated tower.

Runs train_2b.py: FSDP and Megatron on a GPU each, side by side, then in one pair of ranks the same samples over two GPUs
(strong scaling), weights shared by both with the vision tower split over them and with every picture on both, and twice
the samples (weak scaling). What was not run within `--limit-s`, or failed, is told as such.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.ranks import ROOT, environments, run_together

AS_IN_DOCS = ("micro_batch_tokens=25000", "logit_chunk_tokens=30000")
TWO_RANKS = ("num_processes=2",)
SHARED = (*TWO_RANKS, "tensor_parallel=2", "sequence_parallel=true")
Result = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A run of train_2b.py. `one`: the layout of one GPU that it is held against, with the same settings."""

    learner: str
    settings: Sequence[str] = ()
    options: Sequence[str] = ()
    one: str = ""
    may_compile: bool = True  # compile is refused with tensor_parallel > 1


ONE = {"fsdp": Layout("fsdp"), "megatron": Layout("megatron")}
TWO = {
    "fsdp_x2": Layout("fsdp", TWO_RANKS, one="fsdp"),
    "megatron_dp2": Layout("megatron", TWO_RANKS, one="megatron"),
    "megatron_tp2_sp": Layout("megatron", SHARED, one="megatron", may_compile=False),
    "megatron_tp2_sp_replicated_tower": Layout(
        "megatron", SHARED, ("--replicated-tower",), one="megatron", may_compile=False
    ),
    "fsdp_x2_weak": Layout("fsdp", TWO_RANKS, ("--prompts", "32"), one="fsdp"),
    "fsdp_x2_kept_weights": Layout("fsdp", (*TWO_RANKS, "reshard_after_forward=false"), one="fsdp"),
}


def main() -> None:
    """Run what is asked for; print the table and RESULT, write --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(TWO), default=list(TWO))
    parser.add_argument("--compile", action="store_true", help="a minute more for each first step")
    parser.add_argument("--quick", action="store_true", help="three steps each")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--limit-s", type=float, default=540.0, help="end what runs then")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/two_gpu_scaling.json"
    )
    arguments = parser.parse_args()
    common = [flag for flag in ("--quick", "--tiny") if getattr(arguments, flag[2:])]
    until = time.monotonic() + arguments.limit_s
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), common, is_compiled=arguments.compile, until=until)
        found = runs.on_one_gpu()
        found |= runs.on_two_gpus(arguments.only, found)
    told = {"is_compiled": arguments.compile, "layouts": found}
    arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    print(table(found))
    print("RESULT", json.dumps(told))


@dataclass(frozen=True)
class Runs:
    """How train_2b.py is run; `until` is of time.monotonic."""

    directory: Path
    common: Sequence[str]
    is_compiled: bool
    until: float

    def on_one_gpu(self) -> dict[str, Result]:
        """FSDP on the first GPU, Megatron on the second."""
        (plain,) = environments(1)
        visible = plain.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        started = {
            name: subprocess.Popen(
                [sys.executable, "-m", "benchmarks.train_2b", *self.words(name, layout)],
                cwd=ROOT,
                env={**plain, "CUDA_VISIBLE_DEVICES": visible[number]},
            )
            for number, (name, layout) in enumerate(ONE.items())
        }
        try:
            for process in started.values():
                process.wait(max(1.0, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # told as not run
        finally:
            for process in started.values():
                process.kill()
                process.wait()
        return {name: self.result(name) for name in ONE}

    def on_two_gpus(self, names: Sequence[str], alone: Mapping[str, Result]) -> dict[str, Result]:
        """All layouts in one pair of ranks; if one fails, those after it in another pair."""
        waiting = list(names)
        while waiting and time.monotonic() < self.until:
            commands = [self.words(name, TWO[name], self.one_s(name, alone)) for name in waiting]
            path = self.directory / "commands.json"
            path.write_text(json.dumps(commands))
            worker = [sys.executable, "-m", "benchmarks.two_gpu_scaling_work", str(path)]
            left = self.until - time.monotonic()
            run_together([(worker, rank) for rank in environments(2)], left)
            undone = [name for name in waiting if "failed" in self.result(name)]
            waiting = undone[1:]
        return {name: self.result(name) for name in names}

    def one_s(self, name: str, alone: Mapping[str, Result]) -> float | None:
        """The step on one GPU with the same settings."""
        layout = TWO[name]
        is_like = layout.may_compile or not self.is_compiled
        return alone[layout.one].get("step_s") if is_like else None

    def words(self, name: str, layout: Layout, one_s: float | None = None) -> list[str]:
        """train_2b.py's command line for a layout."""
        settings = [*AS_IN_DOCS, *layout.settings]
        if self.is_compiled and layout.may_compile:
            settings.append("compile=true")
        pairs = [word for setting in settings for word in ("--set", setting)]
        options = [*layout.options, *self.common]
        options += [] if one_s is None else ["--one-s", str(one_s)]
        out = str(self.directory / f"{name}.json")
        return ["--learner", layout.learner, *pairs, *options, "--out", out]

    def result(self, name: str) -> Result:
        """What a layout has written."""
        path = self.directory / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {"failed": "not run to its end"}


def table(found: Mapping[str, Result]) -> str:
    """A line a layout."""
    lines = [f"{'layout':34}{'prompts':>8}{'s a step':>10}{'speedup':>9}{'peak GiB':>10}"]
    for name, result in found.items():
        if "failed" in result:
            lines.append(f"{name:34}{result['failed']:>37}")
            continue
        cells = [f"{result['prompts']:8}", f"{result['step_s']:10.3f}"]
        cells += [
            f"{result.get('speedup_vs_one_gpu', nan):9.3f}{result.get('peak_gib', 0.0):10.1f}"
        ]
        lines.append(f"{name:34}{''.join(cells)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
