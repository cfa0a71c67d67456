"""The engine alone under a bare client, for benchmarks/gpu_loop.py: the requests of a step, sent without polyturn."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import aiohttp

from polyturn.sampler.base import Reply, Sampler, SampleRequest
from polyturn.sampler.sglang import wire
from polyturn.sampler.sglang.control import Control

Order = Literal["grouped", "interleaved", "n"]


@dataclass
class FullTurns:
    """A sampler whose replies count as ended where they have their length, so that the conversation goes on.

    `length_of` gives the tokens of a reply (None: those that were asked for); what was asked and answered is kept
    by session, until `asked` is cleared.
    """

    inner: Sampler
    length_of: list[int] | None = None  # one drawn by the request's seed
    asked: dict[str, list[tuple[SampleRequest, Reply]]] = field(default_factory=dict)
    sync_s: float = 0.0

    @property
    def is_lockstep(self) -> bool:
        """That of the inner one."""
        return self.inner.is_lockstep

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Sample, with every "length" told as "stop"."""
        cut = [self._cut(request) for request in requests]
        replies = await self.inner.generate(cut)
        for request, reply in zip(cut, replies, strict=True):
            self.asked.setdefault(request.session, []).append((request, reply))
        return [
            replace(r, finish_reason="stop") if r.finish_reason == "length" else r for r in replies
        ]

    def _cut(self, request: SampleRequest) -> SampleRequest:
        if self.length_of is None:
            return request
        drawn = self.length_of[request.seed % len(self.length_of)]
        return replace(request, max_new_tokens=min(request.max_new_tokens, drawn))

    def update_weights(self, tensors: Iterator, version: int) -> None:
        """Pass on; its seconds are kept."""
        started = time.monotonic()
        self.inner.update_weights(tensors, version)
        self.sync_s = time.monotonic() - started

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Conversation:
    """What the bare client sends: the body of the first request, and for each further turn the ids in between."""

    body: dict
    between: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def conversations(
    asked: dict[str, list[tuple[SampleRequest, Reply]]], settings: wire.WireSettings, key: str
) -> list[Conversation]:
    """A step's requests as a bare client sends them; `key` keeps their pictures apart from those of other runs."""
    uris = wire.PictureUris()
    made: list[Conversation] = []
    for session, turns in asked.items():
        first = turns[0][0]
        body = wire.body(first, settings, uris, rid="", tower=key)
        del body["rid"]
        between = []
        for (before, reply), (after, _) in itertools.pairwise(turns):
            seen = len(before.engine_ids) + len(reply.token_ids)
            if after.images != first.images:
                raise ValueError(f"session {session} shows further pictures")
            between.append(after.engine_ids[seen:])
        made.append(Conversation(body, tuple(between), tuple(r.max_new_tokens for r, _ in turns)))
    return made


@dataclass(frozen=True)
class EngineRun:
    """How long the engine took, its sampled tokens, and prompt tokens of which `cached` were known."""

    seconds: float
    tokens: int
    prompt_tokens: int
    cached: int

    @property
    def rate(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.seconds


def summed_up(runs: Sequence[EngineRun]) -> dict[str, object]:
    """Of runs with the same requests."""
    return {
        "tokens_per_s": median([run.rate for run in runs]),
        "seconds": [round(run.seconds, 3) for run in runs],
        "tokens": runs[-1].tokens,
        "cache_hit": runs[-1].cached / max(1, runs[-1].prompt_tokens),
    }


def ordered(all_of_step: Sequence[Conversation], group: int, order: Order) -> list[Conversation]:
    """The order of submission; "n": one request per prompt, which asks for all siblings at once."""
    if order == "grouped":
        return list(all_of_step)
    firsts = [all_of_step[at::group] for at in range(group)]
    if order == "interleaved":
        return [one for column in firsts for one in column]
    return [_of_all_siblings(one, group) for one in firsts[0]]


def _of_all_siblings(one: Conversation, group: int) -> Conversation:
    body = copy.deepcopy(one.body)
    body["sampling_params"]["n"] = group
    return replace(one, body=body)


def run_engine(url: str, asked: Sequence[Conversation]) -> EngineRun:
    """Send everything at once with the prefix cache empty, and wait; may be called inside of an event loop."""
    return run_engines({url: asked})


def run_engines(asked: Mapping[str, Sequence[Conversation]]) -> EngineRun:
    """The same over several servers at the same time, each with requests of its own, by address."""
    for url in asked:
        Control(url).flush_cache()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(asyncio.run, _run(asked)).result()
    for url in asked:
        Control(url).flush_cache()
    return run


async def _run(asked: Mapping[str, Sequence[Conversation]]) -> EngineRun:
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.monotonic()
        metas = await asyncio.gather(
            *(_converse(session, url, one) for url, of_url in asked.items() for one in of_url)
        )
        seconds = time.monotonic() - started
    told = [meta for of_one in metas for meta in of_one]
    return EngineRun(
        seconds,
        sum(meta["completion_tokens"] for meta in told),
        sum(meta["prompt_tokens"] for meta in told),
        sum(meta.get("cached_tokens") or 0 for meta in told),
    )


async def _converse(session: aiohttp.ClientSession, url: str, one: Conversation) -> list[dict]:
    """All turns of one conversation: what was sampled is sent back with the ids in between."""
    ids = list(one.body["input_ids"])
    metas: list[dict] = []
    for turn, length in enumerate(one.lengths):
        sampling = {**one.body["sampling_params"], "max_new_tokens": length}
        body = {**one.body, "input_ids": ids, "sampling_params": sampling}
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        if isinstance(answer, list):  # siblings of one request: there is one turn only
            return [sibling["meta_info"] for sibling in answer]
        metas.append(answer["meta_info"])
        if turn < len(one.between):
            ids = [*ids, *answer["output_ids"], *one.between[turn]]
    return metas
