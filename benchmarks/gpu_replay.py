"""Two training runs in deterministic mode on one GPU: do they end with the same weights?

    python benchmarks/gpu_replay.py --steps 20 --slowdown

Each run is a process with a server of its own: a Qwen3-VL of 40 M random parameters, three turns of --tokens tokens
each with a new picture, sampler.sglang.deterministic and train.deterministic. Both run at the same time, so that their
requests meet in other batches; then the digests of all trajectory files and of the weights are compared. The gap
between sampler and learner is kept of every step, with its slope over 100 of them.
`--slowdown` runs two more of at most 20 steps, one after the other, with and without determinism: how much longer is a
step, and is the deterministic one's beginning that of the others?
`--cpu-smoke` uses the tests' server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import gpu_loop_work as work  # noqa: E402
from gpu_loop import NEVER, tests_server  # noqa: E402
from gpu_loop_clocks import Unpublished  # noqa: E402
from gpu_loop_engine import FullTurns  # noqa: E402

from benchmarks import shapes  # noqa: E402
from polyturn import environment, grpo  # noqa: E402
from polyturn.determinism import choose_kernels  # noqa: E402
from polyturn.learner.fsdp import FsdpLearner  # noqa: E402
from polyturn.params import Params, parse  # noqa: E402
from polyturn.policy import model  # noqa: E402
from polyturn.progress import Progress  # noqa: E402
from polyturn.render import Renderer  # noqa: E402
from polyturn.runtime import set_up_torch  # noqa: E402
from polyturn.sampler.sglang.build import Site, sglang_sampler  # noqa: E402
from polyturn.training.checkpoint_writer import CheckpointWriter  # noqa: E402
from polyturn.training.parts import Parts  # noqa: E402
from polyturn.training.recorder import Recorder  # noqa: E402
from scripts.gap_drift import PREFIX, trend  # noqa: E402

SMALL = shapes.Shape(1024, 640, 1920, 8, 10, 2, 64, 256, 512, 4, 4, (0, 1))
KINDS = ("deterministic", "fast")
WORK = {"prompts": 8, "siblings": 8, "tokens": 64}  # of a step, of a group, of a turn
GAP = "train/train_rollout_logprob_abs_diff"


class Sink:
    """Keeps what matters of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log_metrics(self, metrics, step=None, *, at_ms=None) -> None:
        """Take a step's metrics."""
        del step, at_ms
        self.steps.append({name: float(value or 0.0) for name, value in metrics.items()})


def params_of(options: argparse.Namespace, urls: list[str]) -> Params:
    """A run's params."""
    is_exact, is_tiny = options.kind == "deterministic", options.cpu_smoke
    tokens = 6 if is_tiny else options.tokens
    return parse(
        {
            "env": {"build": "gpu_loop_work:build_shower", "tools_in_prompt": False},
            "reward": {"terms": [{"term": "gpu_loop_work:share_of_odd_ids"}]},
            "rollout": {
                "prompts_per_step": 2 if is_tiny else options.prompts,
                "group_size": 2 if is_tiny else options.siblings,
                "max_turns": 3,
                "max_new_tokens": 3 * tokens,
                "max_turn_tokens": tokens,
                "max_context_tokens": 2048,
                "blind_problems": 0,
            },
            "sampler": {
                "backend": "sglang",
                "sglang": {
                    "urls": urls,
                    "deterministic": is_exact or is_tiny,
                    "memory_fraction": 0.9,
                    "weight_update": "disk" if is_tiny else "tensor",
                    "dtype": "float32" if is_tiny else "bfloat16",
                    "check_weights": not is_tiny,
                    "extra_flags": [
                        *("--cuda-graph-max-bs-decode", "64", "--max-total-tokens", "131072"),
                    ],
                },
            },
            "learner": {
                "device": "cpu" if is_tiny else "cuda",
                "lr": 1e-4,
                "micro_batch_tokens": 16384,
                "freeze_vision": False,
            },
            "train": {
                "steps": options.steps,
                "updates_per_rollout": 1,
                "eval_every": NEVER,
                "checkpoint_every": NEVER,
                "deterministic": is_exact,
            },
        }
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    """One run; digests and step times."""
    environment.apply()
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="gpu_replay_")))
        policy = work.build_policy(shapes.TINY if options.cpu_smoke else SMALL, torch.device("cpu"))
        work.write(policy, directory / "model")
        urls = [stack.enter_context(tests_server(policy))] if options.cpu_smoke else []
        params = params_of(options, urls)
        set_up_torch(params)
        choose_kernels(params)
        site = Site(
            directory / "model",
            directory,
            lambda path, named: model.save(policy, path, weights=named),
        )
        sampler = sglang_sampler(policy, params, site)
        stack.callback(sampler.close)
        policy.model.to(device)
        renderer = Renderer(policy)
        learner = FsdpLearner(policy, renderer, params.learner, params.loss, 1.0, device=device)
        sink = Sink()
        count = params.rollout.prompts_per_step * (options.data_steps or options.steps)
        parts = Parts(
            sampler=FullTurns(sampler),  # pyright: ignore[reportArgumentType]
            learner=learner,
            renderer=renderer,
            train=work.problems(policy, count, work.SQUARE, 1),
            validation=work.problems(policy, 1, work.SQUARE, 2),
            recorder=Recorder(directory, sink, Progress(options.steps, "replay", is_shown=False)),
            checkpoints=CheckpointWriter(directory / "checkpoints", keep=1),
            candidates=Unpublished(policy, directory / "candidates"),
        )
        started = time.monotonic()
        asyncio.run(grpo.train(parts, params, resume=False))
        files = sorted((directory / "trajectories").glob("step_*.jsonl.gz"))
        rows = sink.steps[: options.steps]
        return {
            "weights": model.weights_digest(policy.model),
            "steps": [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files],
            "seconds": time.monotonic() - started,
            "step_s": median(
                [row["perf/rollout_time"] + row.get("perf/train_time", 0.0) for row in rows]
            ),
            "recomputed_turns": sum(row["perf/recomputed_turns"] for row in rows),
            "cache_hit_turn_3": rows[-1].get("perf/prefix_cache_hit_rate/turn_3"),
            "gap": [row[GAP] for row in rows],
            "gap_trends": {
                name.removeprefix(PREFIX): asdict(
                    trend(range(len(rows)), [row.get(name, 0.0) for row in rows])
                )
                for name in sorted(rows[0])
                if name.startswith(PREFIX)
            },
        }


def start(options: argparse.Namespace, kind: str, steps: int) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    argv = [sys.executable, __file__, "--kind", kind, "--steps", str(steps)]
    argv += ["--data-steps", str(options.steps)]  # a shorter run begins with the same problems
    for name in WORK:
        argv += [f"--{name}", str(getattr(options, name))]
    argv += ["--cpu-smoke"] if options.cpu_smoke else []
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> dict:
    """What a run printed; its other output is shown."""
    told, _ = process.communicate()
    for line in told.splitlines():
        if line.startswith("RUN "):
            return json.loads(line.removeprefix("RUN "))
    raise SystemExit(f"a run ended with status {process.returncode}; its errors are above\n{told}")


def main() -> None:
    """Be one run, or start them and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    for name, value in WORK.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quick", action="store_true", help="4 steps")
    parser.add_argument("--slowdown", action="store_true")
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--data-steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps = 4
    logging.basicConfig(level=logging.WARNING)
    if options.kind:
        print("RUN " + json.dumps(run(options)), flush=True)
        return
    both = [start(options, "deterministic", options.steps) for _ in range(2)]
    first, second = (outcome(process) for process in both)
    pairs = zip(first["steps"], second["steps"], strict=True)
    differing = [step for step, (one, other) in enumerate(pairs) if one != other]
    result: dict[str, object] = {
        "steps": options.steps,
        "equal_weights": first["weights"] == second["weights"],
        "first_differing_step": differing[0] if differing else None,
        "runs": [first, second],
    }
    if options.slowdown:
        steps = min(options.steps, 20)
        alone = {kind: outcome(start(options, kind, steps)) for kind in KINDS}
        result["alone"] = alone
        result["slowdown"] = alone["deterministic"]["step_s"] / alone["fast"]["step_s"]
        result["equal_steps_alone"] = alone["deterministic"]["steps"] == first["steps"][:steps]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_replay.json").write_text(json.dumps(result, indent=1) + "\n")
    print("RESULT " + json.dumps({k: v for k, v in result.items() if k not in ("runs", "alone")}))
    is_equal = result["equal_weights"] and result.get("equal_steps_alone", True)
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
