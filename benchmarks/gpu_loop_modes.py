"""The kinds of work of benchmarks/gpu_loop.py: each trains for some steps, a row a step, and is summed up."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import gpu_loop_work as work
import numpy as np
import torch
from gpu_loop_clocks import Gap, GpuWatch, TimedLearner, TimedRecorder, Unpublished
from gpu_loop_engine import (
    EngineRun,
    FullTurns,
    conversations,
    run_engine,
)
from gpu_loop_work import METER

from benchmarks.kernels import profiled
from polyturn import grpo
from polyturn.params import Params, parse
from polyturn.policy.model import Policy
from polyturn.progress import Progress
from polyturn.sampler.sglang.sampler import SglangSampler
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.parts import Parts

PHASES = ("sample", "reward", "logprobs", "train", "sync", "record", "other")


@dataclass(frozen=True)
class Mode:
    """One kind of work; `skew`: median and 99th percentile of a trajectory's tokens (None: all are of full length)."""

    turns: int
    sizes: tuple[tuple[int, int], ...]
    skew: tuple[int, int] | None = None
    slow_s: float = 0.0
    is_ahead: bool = False  # train.async_steps: 1

    def tokens(self, of_turn: int) -> int:
        """Tokens of a trajectory after its prompt: the most, or where lengths differ twice the mean."""
        return 1600 if self.skew else self.turns * (of_turn + 40)


MODES = {
    "single": Mode(1, work.SQUARE),
    "ahead": Mode(1, work.SQUARE, is_ahead=True),
    "turns": Mode(3, work.SQUARE),
    "skewed": Mode(3, work.GEO3K, skew=(500, 4096), slow_s=10.0),
}


@dataclass
class Bench:
    """Everything that the modes share."""

    options: argparse.Namespace
    params: Params
    policy: Policy
    learner: TimedLearner
    sampler: SglangSampler
    watch: GpuWatch
    directory: Path
    started: float
    result: dict[str, object] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The server's address."""
        return self.sampler.fleet.servers[0].control.url

    def is_late(self) -> str | None:
        """The reason to stop, once the budget of time is spent."""
        return "the benchmark's time is over" if self.left_s() < 0 else None

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.options.budget_s - (time.monotonic() - self.started)


@dataclass
class Steps:
    """Takes each step's metrics, asks the engine for the same by the bare client, and keeps a row of it."""

    bench: Bench
    turns: FullTurns
    is_ahead: bool = False
    recorder: TimedRecorder | None = None
    rows: list[dict[str, float]] = field(default_factory=list)
    engine: list[EngineRun] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> None:
        """A step is over; the last call, after the final score, is none."""
        del at_ms
        if "perf/rollout_time" not in metrics:
            return
        now, bench = time.monotonic(), self.bench
        learner = bench.learner
        told = {name: float(value or 0.0) for name, value in metrics.items()}
        rollout_s = told["perf/rollout_time"]
        ends = sorted(METER.ends.values())
        row = {
            "wall": now - self.began,
            "sample": rollout_s - METER.reward_s,
            "reward": METER.reward_s,
            "logprobs": learner.logprobs_s,
            "train": learner.train_s,
            "sync": self.turns.sync_s,
            "record": self.recorder.record_s if self.recorder else 0.0,
            "validation": told.get("perf/eval_time", 0.0),
            "env_mean": told["perf/env_time/mean"],
            "tokens": told["rollout/response_len/mean"] * len(self.turns.asked),
            "tail": ends[-1] - ends[int(0.9 * len(ends))] if ends else 0.0,
            "gap": told.get("train/train_rollout_logprob_abs_diff", 0.0),
            "cache_hit": told["perf/prefix_cache_hit_rate"],
        }
        row["other"] = row["wall"] - sum(row[name] for name in PHASES[:-1]) - row["validation"]
        for number, idle in enumerate(bench.watch.idle(self.began, now)):
            row["idle" if number == 0 else f"idle_gpu_{number}"] = idle
        self.rows.append(row)
        shown = " ".join(f"{name}={value:.3f}" for name, value in row.items())
        print(f"step {step} {shown}", flush=True)
        self._ask_engine()
        METER.reward_s, METER.ends = 0.0, {}
        learner.train_s = learner.logprobs_s = 0.0
        self.turns.asked.clear()
        self.began = time.monotonic()

    def _ask_engine(self) -> None:
        is_other = bool(self.turns.length_of) or self.is_ahead  # work that the bare client has not
        is_enough = len(self.engine) >= self.bench.options.engine_repeats
        if len(self.rows) == 1 or is_enough or is_other:
            return
        key = f"bare/{id(self)}/{len(self.rows)}"
        asked = conversations(self.turns.asked, self.bench.sampler.settings, key)
        self.engine.append(run_engine(self.bench.url, asked))
        print(
            f"  engine alone {self.engine[-1].seconds:.3f} s, {self.engine[-1].rate:.0f} tokens/s",
            flush=True,
        )


def mode_params(bench: Bench, mode: Mode, steps: int) -> Params:
    """The benchmark's params with the limits of a mode."""
    tokens = bench.options.tokens
    longest = tokens * mode.turns if mode.skew is None else 6000
    tree = bench.params.model_dump()
    tree["env"]["params"] = {"slow_s": mode.slow_s if not bench.options.cpu_smoke else 0.2}
    tree["rollout"] |= {
        "max_turns": mode.turns,
        "max_new_tokens": longest,
        "max_turn_tokens": tokens if mode.skew is None else None,
    }
    tree["train"]["steps"] = steps
    if mode.is_ahead:
        tree["train"]["async_steps"] = 1
        tree["loss"]["tis_mode"] = "token_truncate"
    return parse(tree)


def reply_lengths(mode: Mode, *, is_tiny: bool) -> list[int] | None:
    """Tokens of a reply, to be drawn from: a trajectory's are log-normal and split over its turns."""
    if mode.skew is None:
        return None
    middle, high = mode.skew
    sigma = math.log(high / middle) / 2.3263  # the normal distribution's 99th percentile
    drawn = np.random.default_rng(0).lognormal(math.log(middle), sigma, 4096)
    scale = 100 if is_tiny else 1
    return [max(1, int(value / mode.turns / scale)) for value in np.minimum(drawn, 6000)]


def run_mode(bench: Bench, name: str) -> None:
    """Train for some steps of a mode and put a summary into the result."""
    mode, options = MODES[name], bench.options
    steps = 1 + options.repeats  # the first one warms up
    steps += mode.is_ahead  # after the last step nothing is sampled
    params = mode_params(bench, mode, steps)
    count = params.rollout.prompts_per_step * steps
    seed = 1 + list(MODES).index(name)
    train = work.problems(bench.policy, count, mode.sizes, seed)
    held_out = work.problems(bench.policy, 1, mode.sizes, 100 + seed)
    turns = FullTurns(bench.sampler, reply_lengths(mode, is_tiny=options.cpu_smoke))
    sink = Steps(bench, turns, mode.is_ahead)
    directory = bench.directory / name
    directory.mkdir()
    recorder = TimedRecorder(directory, sink, Progress(steps, name, is_shown=False))
    sink.recorder = recorder
    bench.learner.gap = Gap()
    parts = Parts(
        sampler=turns,  # pyright: ignore[reportArgumentType]
        learner=bench.learner,
        renderer=bench.learner.renderer,
        train=train,
        validation=held_out,
        recorder=recorder,
        checkpoints=CheckpointWriter(directory / "checkpoints", keep=1),
        candidates=Unpublished(bench.policy, directory / "candidates"),
        stop_request=bench.is_late,
    )
    if bench.learner._device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sink.began = time.monotonic()
    asyncio.run(grpo.train(parts, params, resume=False))
    told = bench.result[name] = summary(bench, name, sink)
    if options.profile and name == "single":
        told["profile"] = {kind: profiled(again) for kind, again in bench.learner.again.items()}


def summary(bench: Bench, name: str, sink: Steps) -> dict[str, object]:
    """Medians over the steps after the first, and the engine's own numbers."""
    whole = sink.rows[:-1] if sink.is_ahead and len(sink.rows) > 2 else sink.rows
    rows = whole[1:] or whole

    def middle(key: str) -> float:
        return median([row[key] for row in rows if key in row])

    is_cuda = bench.learner._device.type == "cuda"
    told: dict[str, object] = {
        "repeats": len(rows),
        "deterministic": bench.params.sampler.sglang.deterministic,
        "step_s": middle("wall"),
        "step_s_all": [round(row["wall"], 3) for row in sink.rows],
        "phases_s": {key: round(middle(key), 4) for key in PHASES},
        "env_mean_s": middle("env_mean"),
        "tokens_per_s": median([row["tokens"] / row["wall"] for row in rows]),
        "sampled_tokens_per_s": median(
            [row["tokens"] / (row["sample"] + row["reward"]) for row in rows]
        ),
        "tail_90_to_100_s": middle("tail"),
        "weight_sync_s": middle("sync"),
        "cache_hit": middle("cache_hit"),
        "logprob_gap": (bench.learner.gap or Gap()).table(),
        "learner_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
        "gpu_peak_gib": bench.watch.peak_gib,
    }
    idle = [key for key in rows[0] if key.startswith("idle")]
    told |= {key.replace("idle", "idle_fraction", 1): middle(key) for key in idle}
    if sink.engine:
        told["engine_tokens_per_s"] = median([run.rate for run in sink.engine])
        told["engine_s_all"] = [round(run.seconds, 3) for run in sink.engine]
        told["engine_cache_hit"] = sink.engine[-1].cached / max(1, sink.engine[-1].prompt_tokens)
        told["rollout_fraction_of_engine"] = median(
            [
                row["tokens"] / (row["sample"] + row["reward"]) / run.rate
                for row, run in zip(sink.rows[1:], sink.engine, strict=False)
            ]
        )
    if name in ("single", "ahead"):
        told["ratio_vs_trl"] = bench.options.trl_step_s / middle("wall")
    return told
