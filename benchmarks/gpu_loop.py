"""The whole training loop on one GPU at the shape of Qwen3-VL-2B (random weights), by phase and beside the engine alone.

    python benchmarks/gpu_loop.py --modes single,ahead,turns --set learner.compile=true

`grpo.train` itself runs: SGLang servers, environment, grading, the FSDP learner and weights over CUDA IPC, all on
one GPU, one server for all modes. After each step its requests go to the same server by a bare client. Modes:

    single  the work of TRL's step: 128 samples of one turn of 512 tokens, with a picture
    ahead   the same with train.async_steps 1
    turns   three turns of 512 tokens
    skewed  three turns, median 500 and 99th percentile 4,096 tokens, pictures as of Geometry3K, 1% of env steps slow
    orders  the engine alone, in several orders of submission; --compare-transport: on two servers

`--cpu-smoke` runs tiny sizes against the tests' server instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import gpu_loop_work as work  # noqa: E402
from gpu_loop_clocks import GpuWatch, TimedLearner  # noqa: E402
from gpu_loop_engine import Order  # noqa: E402
from gpu_loop_modes import MODES, PHASES, Bench, run_mode  # noqa: E402
from gpu_loop_orders import Contest, compare, first_requests, second_server  # noqa: E402

from benchmarks import shapes  # noqa: E402
from polyturn import environment  # noqa: E402
from polyturn.determinism import choose_kernels  # noqa: E402
from polyturn.params import Params, parse  # noqa: E402
from polyturn.policy import model  # noqa: E402
from polyturn.policy.model import Policy  # noqa: E402
from polyturn.render import Renderer  # noqa: E402
from polyturn.runtime import set_up_torch  # noqa: E402
from polyturn.sampler.sglang.build import Site, sglang_sampler  # noqa: E402
from polyturn.sampler.sglang.process import ServerProcess  # noqa: E402
from polyturn.sampler.sglang.sampler import SglangSampler  # noqa: E402

NEVER = 10**6
SERVER_FLAGS = ("--cuda-graph-max-bs-decode", "128")
TRL_STEP_S = 30.8  # TRL 1.16 GRPOTrainer, the work of mode `single`, on the same kind of GPU (recorded baseline)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", default="single,ahead,turns,skewed,orders")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of a mode")
    parser.add_argument("--engine-repeats", type=int, default=5, help="bare clients of a mode")
    parser.add_argument("--order-repeats", type=int, default=3)
    parser.add_argument(
        "--compare-transport", action="store_true", help="orders: on a second server too"
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of everything")
    parser.add_argument("--deterministic", action="store_true", help="sampler.sglang.deterministic")
    parser.add_argument("--tokens", type=int, default=512, help="of a turn")
    parser.add_argument("--trl-step-s", type=float, default=TRL_STEP_S)
    parser.add_argument(
        "--profile", action="store_true", help="kernels of the learner's passes in mode `single`"
    )
    parser.add_argument("--budget-s", type=float, default=480, help="no new step begins after it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any param")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="", help="of the result's file, after gpu_loop_")
    parser.add_argument(
        "--cpu-smoke", action="store_true", help="tiny, on a CPU, without an engine"
    )
    options = parser.parse_args()
    if options.quick or options.cpu_smoke:
        options.repeats = options.engine_repeats = options.order_repeats = 1
    if options.cpu_smoke:
        options.tokens = 6
    return options


def benchmark_params(options: argparse.Namespace, urls: Sequence[str] = ()) -> Params:
    """What all modes have in common; `--set` comes last."""
    is_tiny = options.cpu_smoke
    is_exact = options.deterministic or is_tiny
    tree: dict[str, dict] = {
        "model": {"dtype": "float32" if is_tiny else "bfloat16"},
        "env": {"build": "gpu_loop_work:build_env", "tools_in_prompt": False},
        "reward": {"terms": [{"term": "gpu_loop_work:share_of_odd_ids"}]},
        "rollout": {
            "prompts_per_step": 2 if is_tiny else 16,
            "group_size": 2 if is_tiny else 8,
            "max_context_tokens": 8192,
            "blind_problems": 0,
        },
        "sampler": {
            "backend": "sglang",
            "sglang": {
                "urls": list(urls),
                "deterministic": is_exact,
                "memory_fraction": 0.9,  # two servers that start at once only agree on tokens
                "bucket_mb": 2048,
                "picture_transport": "host" if is_exact else "cuda_ipc",
                "weight_update": "disk" if is_tiny else "tensor",
                "dtype": "float32" if is_tiny else "bfloat16",
                "check_weights": not is_tiny,
                "check_tensors": 32,
                "extra_flags": [] if is_tiny else [*SERVER_FLAGS, *server_tokens(options)],
            },
        },
        "learner": {
            "device": "cpu" if is_tiny else "cuda",
            "precision": "float32" if is_tiny else "bfloat16",
            "freeze_vision": False,
            "lr": 1e-6,
            "micro_batch_tokens": 512 if is_tiny else 8192,
        },
        "train": {"updates_per_rollout": 1, "eval_every": NEVER, "checkpoint_every": NEVER},
    }
    for setting in options.set:
        path, _, value = setting.partition("=")
        section = tree
        *parents, key = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = yaml.safe_load(value)
    return parse(tree, origin="the benchmark")


def server_tokens(options: argparse.Namespace) -> list[str]:
    """Room for the keys and values of the largest mode's step (115 kB a token at this shape), and no more."""
    modes = [MODES[name] for name in options.modes.split(",") if name in MODES]
    longest = max((mode.tokens(options.tokens) for mode in modes), default=options.tokens)
    return ["--max-total-tokens", str(128 * (longest + 400))]


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Bench]:
    """Model, server and learner; all ends with the context."""
    started = time.monotonic()
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    shape = shapes.TINY if options.cpu_smoke else shapes.QWEN3_VL_2B
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_loop_")))
        policy = work.build_policy(shape, device)
        work.write(policy, directory / "model")
        print(f"model written after {time.monotonic() - started:.1f} s", flush=True)
        urls = [stack.enter_context(tests_server(policy))] if options.cpu_smoke else []
        params = benchmark_params(options, urls)
        set_up_torch(params)
        choose_kernels(params)
        stack.callback(keep_logs, directory, options.out)
        before = time.monotonic()
        with ExitStack() as beside:
            second = None
            if options.compare_transport:
                second = beside.enter_context(second_server(params, directory))
            site = Site(directory / "model", directory, partial(_write, policy))
            sampler = sglang_sampler(policy, params, site)
            stack.callback(sampler.close)
            server_s = time.monotonic() - before
            print(f"server up after {server_s:.1f} s", flush=True)
            found = _orders(options, policy, sampler, second)
        learner = TimedLearner(
            policy, Renderer(policy), params.learner, params.loss, 1.0, device=device
        )
        watch = stack.enter_context(GpuWatch())
        bench = Bench(options, params, policy, learner, sampler, watch, directory, started)
        bench.result |= {
            "facts": {**facts(options, params), "server_up_s": round(server_s, 1)},
            **found,
        }
        yield bench


def _write(policy: Policy, path: Path, named: Iterator[tuple[str, torch.Tensor]]) -> None:
    model.save(policy, path, weights=named)


def _orders(
    options: argparse.Namespace,
    policy: Policy,
    sampler: SglangSampler,
    second: tuple[str, ServerProcess] | None,
) -> dict[str, object]:
    """Mode `orders`, before there is a learner on the GPU."""
    if "orders" not in options.modes.split(","):
        return {}
    num_prompts, group_size = (2, 2) if options.cpu_smoke else (16, 8)
    asked = first_requests(
        work.problems(policy, num_prompts, work.SQUARE, 99),
        Renderer(policy),
        sampler.settings,
        (group_size, options.tokens),
    )
    urls = {sampler.params.picture_transport: sampler.fleet.servers[0].control.url}
    if second is not None:
        second[1].wait_until_ready(300)
        urls[second[0]] = second[1].control.url
    kinds: list[Order] = ["grouped", "interleaved"]
    if not sampler.params.deterministic:
        kinds.append("n")  # siblings of one request would come out the same there
    try:
        return {"orders": compare(Contest(urls, asked, group_size, kinds), options.order_repeats)}
    except Exception:  # the other modes still tell something
        traceback.print_exc()
        return {}


def facts(options: argparse.Namespace, params: Params) -> dict[str, object]:
    """What a reader of the numbers has to know."""
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "trl_step_s": options.trl_step_s,
        "params": options.set,
        "picture_transport": params.sampler.sglang.picture_transport,
    }


@contextmanager
def tests_server(policy: Policy) -> Iterator[str]:
    """The server that the tests use in the engine's place."""
    from tests.unit.sampler.sglang_server import FakeServer, serving  # noqa: PLC0415

    with serving(FakeServer(replace(policy, model=copy.deepcopy(policy.model)))) as server:
        yield server.url


def keep_logs(directory: Path, out: Path) -> None:
    """The servers' logs beside the results."""
    out.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("logs/*.log"):
        (out / f"gpu_loop_{log.name}").write_bytes(log.read_bytes()[-2_000_000:])


def main() -> None:
    """Run the modes one after the other; what fails is told and the rest goes on."""
    options = arguments()
    logging.basicConfig(level=logging.WARNING)
    environment.apply()
    failed = False
    with opened(options) as bench:
        for name in options.modes.split(","):
            if name == "orders":  # done while the servers came up
                continue
            if bench.is_late():
                print(f"mode {name} is left out: {bench.is_late()}", flush=True)
                continue
            try:
                run_mode(bench, name)
            except Exception:  # the other modes still tell something
                failed = True
                traceback.print_exc()
            report(bench)
    sys.exit(1 if failed else 0)


def report(bench: Bench) -> None:
    """Table, file and RESULT line of what there is so far."""
    result, options = bench.result, bench.options
    kind = "deterministic" if bench.params.sampler.sglang.deterministic else "not deterministic"
    print(
        f"\n{'mode':<10}{'step s':>8}"
        + "".join(f"{phase:>10}" for phase in PHASES)
        + f"{'idle':>7}{'of engine':>11}"
    )
    for name in MODES:
        row = result.get(name)
        if isinstance(row, dict):
            phases = "".join(f"{row['phases_s'][phase]:>10.3f}" for phase in PHASES)
            idle, share = (
                row.get("idle_fraction", math.nan),
                row.get("rollout_fraction_of_engine", math.nan),
            )
            print(f"{name:<10}{row['step_s']:>8.2f}{phases}{idle:>7.2f}{share:>11.3f}   {kind}")
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.name or kind.replace(" ", "_")
    (options.out / f"gpu_loop_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    whole = [
        row for mode in ("turns", "single", "skewed") if isinstance(row := result.get(mode), dict)
    ]
    if not whole:
        return
    first = whole[0]
    gap = first["logprob_gap"].get("all", {}).get("mean")
    single = result.get("single")
    line = {
        "ratio_vs_trl": single.get("ratio_vs_trl") if isinstance(single, dict) else None,
        "logprob_gap_mean": gap,
        "rollout_fraction_of_engine": first.get("rollout_fraction_of_engine"),
        "weight_sync_s": first["weight_sync_s"],
        "idle_fraction": first.get("idle_fraction"),
        "step_s": first["step_s"],
        "phases_s": first["phases_s"],
        "deterministic": bench.params.sampler.sglang.deterministic,
    }
    print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
