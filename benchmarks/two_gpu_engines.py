"""SGLang on two GPUs at the shape of Qwen3-VL-2B (random weights): two servers and tensor parallelism against one server.

    python benchmarks/two_gpu_engines.py --weights

A server on GPU 0, one on GPU 1 and one over both are there at the same time; while one is timed the others idle. The
work is that of gpu_loop's mode `single`: 128 requests, 16 pictures, 512 tokens each, sent by a bare client.

    one  all requests to the server on GPU 0
    two  to both single servers, each request to the one that polyturn's fleet picks for it
    tp2  to the server with --tp-size 2

`--weights`: how long an update of all weights takes from a trainer on GPU 0, through polyturn's own fleet: over NCCL to
the server on GPU 1, over CUDA IPC to the one on GPU 0, and over CUDA IPC to GPU 1. Before each is timed, changed
weights are pushed by it and all digests compared.

`--cpu-smoke` runs tiny sizes against the tests' servers instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import gpu_loop_work as work  # noqa: E402
from gpu_loop import SERVER_FLAGS, tests_server  # noqa: E402
from gpu_loop_engine import Conversation, EngineRun, run_engines, summed_up  # noqa: E402
from gpu_loop_orders import first_requests, keyed  # noqa: E402

from benchmarks import shapes  # noqa: E402
from polyturn import environment  # noqa: E402
from polyturn.params import SglangParams  # noqa: E402
from polyturn.policy import model  # noqa: E402
from polyturn.policy.model import Policy  # noqa: E402
from polyturn.render import Renderer  # noqa: E402
from polyturn.sampler.sglang import process, wire  # noqa: E402
from polyturn.sampler.sglang.broadcast import DistributedTransfer  # noqa: E402
from polyturn.sampler.sglang.checksums import engine_hash  # noqa: E402
from polyturn.sampler.sglang.control import Control  # noqa: E402
from polyturn.sampler.sglang.fleet import Fleet, Server  # noqa: E402
from polyturn.sampler.sglang.process import Launch, ServerProcess  # noqa: E402
from polyturn.sampler.sglang.weights import DiskTransfer, TensorTransfer, Transfer  # noqa: E402

PLACES = {"gpu0": range(1), "gpu1": range(1, 2), "both": range(2)}  # a server's GPUs
BUCKET_BYTES = 2048 * 1_000_000
START_S = 400.0
PUSH_S = 60.0  # of one call; a server that a way has broken is given up


@dataclass(frozen=True)
class Size:
    """How much work a round is."""

    shape: shapes.Shape
    prompts: int
    siblings: int
    tokens: int


FULL = Size(shapes.QWEN3_VL_2B, 16, 8, 512)
TINY = Size(shapes.TINY, 2, 2, 6)


@dataclass
class Bench:
    """Servers by place; one that did not come up is missing, and `errors` says why."""

    options: argparse.Namespace
    size: Size
    policy: Policy
    directory: Path
    params: SglangParams
    urls: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """What fails is told and the rest goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.errors[what] = f"{type(error).__name__}: {str(error)[-600:]}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--weights", action="store_true", help="time weight updates too")
    parser.add_argument("--picture-transport", choices=("host", "cuda_ipc"), default="host")
    parser.add_argument("--quick", action="store_true", help="one round, one push")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/two_gpu_engines.json"
    )
    parser.add_argument(
        "--cpu-smoke", action="store_true", help="tiny, on a CPU, without an engine"
    )
    options = parser.parse_args()
    if options.quick or options.cpu_smoke:
        options.rounds = options.pushes = 1
    if not options.cpu_smoke and torch.cuda.device_count() < 2:
        raise SystemExit(f"two GPUs are needed, torch sees {torch.cuda.device_count()}")
    return options


def server_params(options: argparse.Namespace, size: Size) -> SglangParams:
    """Of each server; keys and values for one round and no more, so that two fit on a GPU."""
    room = size.prompts * size.siblings * (size.tokens + 400)
    return SglangParams(
        deterministic=False,
        memory_fraction=0.9,  # servers that start at once only agree on tokens
        picture_transport=options.picture_transport,
        extra_flags=(*SERVER_FLAGS, "--max-total-tokens", str(room)),
    )


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Bench]:
    """Model and servers; all ends with the context."""
    is_tiny = options.cpu_smoke
    size = TINY if is_tiny else FULL
    device = torch.device("cpu" if is_tiny else "cuda:0")
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="two_gpu_engines_"))
        policy = work.build_policy(size.shape, device)
        bench = Bench(options, size, policy, Path(name), server_params(options, size))
        if is_tiny:
            bench.urls |= {place: stack.enter_context(tests_server(policy)) for place in PLACES}
        else:
            work.write(policy, bench.directory / "model")
            _start_all(bench, stack)
        yield bench


def _start_all(bench: Bench, stack: ExitStack) -> None:
    started = time.monotonic()
    running = {place: _start(bench, place) for place in PLACES}
    stack.callback(_end_all, bench, running)
    for place, server in running.items():
        with bench.noting(f"start {place}"):
            server.wait_until_ready(START_S)
            bench.urls[place] = server.control.url
            print(f"server {place} up after {time.monotonic() - started:.1f} s", flush=True)


def _start(bench: Bench, place: str) -> ServerProcess:
    gpus = PLACES[place]
    update = "distributed" if place == "gpu1" else "tensor"
    params = bench.params.model_copy(
        update={"tensor_parallel": len(gpus), "weight_update": update, "gpu_offset": gpus[0]}
    )
    log, port = bench.directory / "logs" / f"two_gpu_engines_{place}.log", process.free_port()
    launch = Launch(bench.directory / "model", params.dtype, 4096, gpus, log)
    argv = process.command(launch, params, seed=0, port=port)
    return process.start(
        argv, Control(f"http://127.0.0.1:{port}"), log, process.environment(params)
    )


def _end_all(bench: Bench, running: Mapping[str, ServerProcess]) -> None:
    bench.options.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(running)) as pool:
        list(pool.map(ServerProcess.close, running.values()))
    for server in running.values():
        text = server.log.read_bytes()[-1_000_000:]
        (bench.options.out.parent / server.log.name).write_bytes(text)


# -- throughput ------------------------------------------------------------------------------------------------


def contestants(bench: Bench) -> dict[str, Sequence[str]]:
    """The places of each kind whose servers are up."""
    kinds = {"one": ("gpu0",), "two": ("gpu0", "gpu1"), "tp2": ("both",)}
    return {kind: at for kind, at in kinds.items() if all(place in bench.urls for place in at)}


def throughput(bench: Bench) -> dict[str, object]:
    """Every kind in turn, in several rounds; one round before warms all servers up."""
    size = bench.size
    family = bench.policy.family
    settings = wire.WireSettings(family.end_ids, family.banned_ids, is_seeded=False)
    problems = work.problems(bench.policy, size.prompts, work.SQUARE, 99)
    grouped = first_requests(
        problems, Renderer(bench.policy), settings, (size.siblings, size.tokens)
    )
    asked = {  # siblings apart, in the order in which polyturn sets out
        f"{prompt}/{sibling}": grouped[prompt * size.siblings + sibling]
        for sibling in range(size.siblings)
        for prompt in range(size.prompts)
    }
    kinds = contestants(bench)
    with bench.noting("warm-up"):
        run_engines({url: _fresh(asked.values(), "warm") for url in bench.urls.values()})
    runs: dict[str, list[EngineRun]] = {kind: [] for kind in kinds}
    for number in range(bench.options.rounds):
        for kind, places in kinds.items():
            with bench.noting(f"{kind} round {number}"):
                shared = spread([bench.urls[place] for place in places], asked)
                key = f"{kind}/{number}"
                run = run_engines({url: _fresh(each, key) for url, each in shared.items()})
                runs[kind].append(run)
                counts = "+".join(str(len(each)) for each in shared.values())
                told = f"{kind} ({counts} requests): {run.seconds:.3f} s {run.rate:.0f} tokens/s"
                print(f"  {told}", flush=True)
    return {kind: summed_up(done) for kind, done in runs.items() if done}


def spread(urls: Sequence[str], asked: Mapping[str, Conversation]) -> dict[str, list[Conversation]]:
    """Each request with the server that the fleet picks for its session."""
    fleet = Fleet(
        [Server(Control(url)) for url in urls],
        DiskTransfer(Path("/nonexistent"), lambda *_: None),  # pushes nothing here
        torch.float32,
        is_tied=True,
        hash_tensor=None,
    )
    shared: dict[str, list[Conversation]] = {url: [] for url in urls}
    for session, one in asked.items():
        server = fleet.pick(session)
        assert server is not None  # all live
        shared[server.control.url].append(one)
    return shared


def _fresh(asked: Iterable[Conversation], key: str) -> list[Conversation]:
    return [keyed(one, key) for one in asked]


# -- weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to push weights to the server of a place."""

    place: str
    transfer: Transfer
    hash_tensor: Callable[[Tensor], str]


def ways(bench: Bench) -> dict[str, Way]:
    """All ways between the GPUs; on a CPU the one through a directory."""
    if bench.options.cpu_smoke:
        from tests.unit.sampler.sglang_server import hash_tensor  # noqa: PLC0415

        def write(path: Path, named: Iterator[tuple[str, Tensor]]) -> None:
            model.save(bench.policy, path, weights=named)

        return {"disk": Way("gpu1", DiskTransfer(bench.directory / "weights", write), hash_tensor)}
    dtype = torch.bfloat16
    ipc = TensorTransfer(dtype, BUCKET_BYTES, 1)
    found = {
        "nccl_to_gpu1": Way("gpu1", DistributedTransfer(dtype, BUCKET_BYTES, 1), engine_hash),
        "ipc_to_gpu0": Way("gpu0", ipc, engine_hash),
        "ipc_to_gpu1": Way("gpu1", ipc, engine_hash),
    }
    return {name: way for name, way in found.items() if way.place in bench.urls}


def weight_updates(bench: Bench) -> dict[str, object]:
    """Seconds of each way; the first push of one, of changed weights, is compared."""
    found: dict[str, object] = {}
    for name, way in ways(bench).items():
        with bench.noting(name):
            try:
                found[name] = _timed(bench, way)
                print(f"  {name}: {found[name]}", flush=True)
            finally:
                way.transfer.close()
    return found


def _timed(bench: Bench, way: Way) -> dict[str, object]:
    parameters = dict(bench.policy.model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(1.03125)
    dtype = next(iter(parameters.values())).dtype
    servers = [Server(Control(bench.urls[way.place], PUSH_S))]
    compared = Fleet(servers, way.transfer, dtype, is_tied=True, hash_tensor=way.hash_tensor)
    plain = Fleet(servers, way.transfer, dtype, is_tied=True, hash_tensor=None)
    first_s, num_compared = _seconds(lambda: compared.update_weights(iter(parameters.items()), 1))
    seconds = [
        _seconds(partial(plain.update_weights, iter(parameters.items()), 2 + number))[0]
        for number in range(bench.options.pushes)
    ]
    gigabytes = sum(each.numel() * each.element_size() for each in parameters.values()) / 1e9
    return {
        "seconds": median(seconds),
        "all_s": [round(each, 4) for each in seconds],
        "gb": round(gigabytes, 3),
        "gb_per_s": gigabytes / median(seconds),
        "first_with_digests_s": round(first_s, 3),
        "tensors_compared": num_compared,
    }


def _seconds(push: Callable[[], int]) -> tuple[float, int]:
    """How long a push took until it is done on this GPU, and how many tensors were compared."""
    started = time.monotonic()
    compared = push()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started, compared


def main() -> None:
    """Run, print RESULT, write --out."""
    options = arguments()
    environment.apply()
    started = time.monotonic()
    with opened(options) as bench:
        result: dict[str, object] = {}
        result["throughput"] = throughput(bench)
        report(bench, result, started)
        if options.weights:
            result["weights"] = weight_updates(bench)
            report(bench, result, started)
    print(f"ended after {time.monotonic() - started:.1f} s")
    sys.exit(1 if bench.errors else 0)


def report(bench: Bench, result: dict[str, object], started: float) -> None:
    """RESULT line and file of what there is so far."""
    rates = {kind: row["tokens_per_s"] for kind, row in result.get("throughput", {}).items()}  # type: ignore[union-attr]
    line = {
        "ratio_vs_one_server": {
            kind: rate / rates["one"] for kind, rate in rates.items() if "one" in rates
        },
        "tokens_per_s": rates,
        "weight_update_s": {n: row["seconds"] for n, row in result.get("weights", {}).items()},  # type: ignore[union-attr]
        "errors": bench.errors,
    }
    facts = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "picture_transport": bench.options.picture_transport,
        "requests": bench.size.prompts * bench.size.siblings,
        "tokens": bench.size.tokens,
        "seconds": round(time.monotonic() - started, 1),
    }
    bench.options.out.parent.mkdir(parents=True, exist_ok=True)
    bench.options.out.write_text(
        json.dumps({**line, "facts": facts, "raw": result}, indent=1) + "\n"
    )
    print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
