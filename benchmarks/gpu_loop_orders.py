"""The engine alone in several orders of submission and ways of handing over pictures, for benchmarks/gpu_loop.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_loop_engine import Conversation, EngineRun, Order, ordered, run_engine, summed_up

from polyturn.params import Params
from polyturn.render import Renderer
from polyturn.sampler.base import SampleRequest
from polyturn.sampler.sglang import process, wire
from polyturn.sampler.sglang.control import Control
from polyturn.sampler.sglang.process import Launch, ServerProcess
from polyturn.types import Problem

SECOND_TOKENS = 150_000  # keys and values of the second server: room for one step


@dataclass(frozen=True)
class Contest:
    """Servers by the name of their picture transport, and the requests that all of them get."""

    urls: dict[str, str]
    asked: Sequence[Conversation]
    group_size: int
    kinds: Sequence[Order]


def first_requests(
    problems: Sequence[Problem],
    renderer: Renderer,
    settings: wire.WireSettings,
    shape: tuple[int, int],
) -> list[Conversation]:
    """One conversation of a turn for each sibling; `shape` is (siblings, tokens of a reply)."""
    uris = wire.PictureUris()
    made: list[Conversation] = []
    for number, problem in enumerate(problems):
        prompt = renderer.prompt(problem.messages)
        for sibling in range(shape[0]):
            request = SampleRequest(
                f"{number}/{sibling}",
                prompt.engine_ids,
                prompt.images,
                1000 * number + sibling,
                shape[1],
            )
            body = wire.body(request, settings, uris, rid="", tower="")
            del body["rid"]
            made.append(Conversation(body, (), (shape[1],)))
    return made


def compare(contest: Contest, repeats: int) -> dict[str, object]:
    """Every order on every server, in turn; the first round warms up and does not count."""
    found: dict[str, list[EngineRun]] = {}
    for repeat in range(repeats + 1):
        for kind in contest.kinds if repeat else contest.kinds[:1]:
            for transport, url in contest.urls.items():
                fresh = [keyed(one, f"{kind}/{transport}/{repeat}") for one in contest.asked]
                run = run_engine(url, ordered(fresh, contest.group_size, kind))
                if repeat:
                    found.setdefault(f"{transport} {kind}", []).append(run)
                told = f"{transport} {kind}: {run.seconds:.3f} s {run.rate:.0f} tokens/s"
                print(f"  engine {told}", flush=True)
    return {name: summed_up(runs) for name, runs in found.items()}


def keyed(one: Conversation, key: str) -> Conversation:
    """The same requests with pictures that no server has embedded yet."""
    hashes = [f"{abs(hash((key, known))):016x}" for known in one.body.get("mm_hashes", ())]
    return replace(one, body={**one.body, "mm_hashes": hashes})


@contextmanager
def second_server(params: Params, directory: Path) -> Iterator[tuple[str, ServerProcess]]:
    """A server with the other picture transport, which starts beside the loop's; its name and process."""
    chosen = params.sampler.sglang
    name = "host" if chosen.picture_transport == "cuda_ipc" else "cuda_ipc"
    flags = (*chosen.extra_flags, "--max-total-tokens", str(SECOND_TOKENS))
    chosen = chosen.model_copy(update={"picture_transport": name, "extra_flags": flags})
    log, port = directory / "logs" / "second.log", process.free_port()
    launch = Launch(directory / "model", chosen.dtype, 4096, range(1), log)
    argv = process.command(launch, chosen, seed=0, port=port)
    control = Control(f"http://127.0.0.1:{port}")
    running = process.start(argv, control, log, process.environment(chosen))
    try:
        yield name, running
    finally:
        running.close()
