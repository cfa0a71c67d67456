"""The sampler over SGLang servers: a trajectory stays on its server, faults are retried, weights are checked."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import cast

import aiohttp
from torch import Tensor

from polyturn.params import SglangParams
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.sglang import wire
from polyturn.sampler.sglang.control import ServerError
from polyturn.sampler.sglang.fleet import Fleet, Server
from polyturn.sampler.sglang.wires import Wires
from polyturn.seeds import derive

logger = logging.getLogger(__name__)


class IdenticalSiblingsError(ServerError):
    """Siblings came out the same: the server does not honour seeds."""


@dataclass
class SglangCounts:
    """What happened since the last `take`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    failures: int = 0
    weight_sync_s: float = 0.0
    tensors_compared: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts as metrics; the hit rate is that of prompt tokens."""
        return {
            "perf/prefix_cache_hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "perf/sampler_retries": float(self.retries),
            "perf/sampler_failures": float(self.failures),
            "perf/update_weights_time": self.weight_sync_s,
            "perf/weights_compared": float(self.tensors_compared),
        }


def added(counts: Sequence[SglangCounts]) -> SglangCounts:
    """The counts of all ranks together; they push weights at the same time."""
    columns = zip(*map(astuple, counts), strict=True)
    sync_s = max(one.weight_sync_s for one in counts)
    return replace(SglangCounts(*map(sum, columns)), weight_sync_s=sync_s)


@dataclass
class SglangSampler:
    """Samples over HTTP; `fleet` owns the servers."""

    fleet: Fleet
    settings: wire.WireSettings
    params: SglangParams
    is_vision_frozen: bool
    is_lockstep: bool = False  # replies come one by one: a trajectory need not wait for the others
    counts: SglangCounts = field(default_factory=SglangCounts)
    _uris: wire.PictureUris = field(default_factory=wire.PictureUris)
    _version: int = -1
    _wires: Wires | None = None
    # Of this sampler alone: a server that was given by URL may know pictures from another run's tower.
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Sample one reply per request, in the order of the requests, all in flight together.

        A request that fails on its server is tried again (`retries`), on another server if there is one; what
        remains failed comes back with finish_reason "error".
        """
        asked = (self._open().submit(self._one(request)) for request in requests)
        return list(await asyncio.gather(*asked))

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push weights to all servers, empty their prefix caches, and compare checksums.

        Raises:
            ServerError: a server refuses, tells another version afterwards, or holds other tensors.
        """
        started = time.monotonic()
        self.counts.tensors_compared += self.fleet.update_weights(tensors, version)
        self._version = version
        self.counts.weight_sync_s += time.monotonic() - started

    def rest(self) -> None:
        """Give the GPU's memory back (release_memory) until the next weights arrive."""
        if self.params.release_memory:
            self.fleet.release()

    def take_counts(self) -> SglangCounts:
        """This rank's counts so far; counting starts again."""
        counts, self.counts = self.counts, SglangCounts()
        return counts

    def take_metrics(self) -> Mapping[str, float]:
        """The counts of all ranks as metrics; counting starts again (collective)."""
        return added(self.fleet.world.all_gather(self.take_counts())).metrics()

    def close(self) -> None:
        """End servers that polyturn started."""
        wires, self._wires = self._wires, None
        try:
            if wires is not None:
                wires.close()
        finally:
            self.fleet.close()

    # -- one reply --------------------------------------------------------------------------------------------

    async def _one(self, request: SampleRequest) -> Reply:
        failure = "no server is left"
        for attempt in range(self.params.retries + 1):
            server = self.fleet.pick(request.session, attempt)
            if server is None:
                break
            if attempt:
                self.counts.retries += 1
            try:
                async with self._open().limit:
                    answer = await self._post(server, request)
            except (aiohttp.ClientError, TimeoutError, ServerError) as error:
                failure = f"{server.control.url}: {type(error).__name__}: {error}"
                logger.warning("reply %s, attempt %d: %s", request.session, attempt + 1, failure)
                await self.fleet.look_at(server)
                continue
            return self._reply(answer, request)
        self.counts.failures += 1
        return self._failed(f"{failure} (after sampler.sglang.retries {self.params.retries})")

    def _reply(self, answer: Mapping[str, object], request: SampleRequest) -> Reply:
        try:
            reply = wire.reply(answer, version=self._version)
        except wire.WireError as error:
            self.counts.failures += 1
            logger.warning("reply %s: %s", request.session, error)
            return self._failed(str(error))
        self.counts.prompt_tokens += reply.prompt_length
        self.counts.cached_tokens += wire.num_cached(answer)
        return reply

    async def _post(self, server: Server, request: SampleRequest) -> Mapping[str, object]:
        rid = uuid.uuid4().hex  # of one length: /abort_request takes prefixes
        tower = self._key if self.is_vision_frozen else f"{self._key}/{self._version}"
        content = wire.body(request, self.settings, self._uris, rid=rid, tower=tower)
        url = f"{server.control.url}/generate"
        try:
            async with self._open().session.post(url, json=content) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise ServerError(f"HTTP {response.status}: {text[:300]}")
                return _parsed(text)
        except (TimeoutError, asyncio.CancelledError):
            await asyncio.shield(self._abort(server, rid))
            raise

    async def _abort(self, server: Server, rid: str) -> None:
        """Tell a server that nobody waits for this reply any longer."""
        try:
            url = f"{server.control.url}/abort_request"
            async with self._open().session.post(
                url, json={"rid": rid}, timeout=aiohttp.ClientTimeout(5)
            ):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("abort of %s at %s: %s", rid, server.control.url, error)

    def _failed(self, error: str) -> Reply:
        return Reply((), (), "error", 0, self._version, error)

    def _open(self) -> Wires:
        if self._wires is None:
            self._wires = Wires(self.params.request_timeout_s, self.params.max_concurrency)
        return self._wires

    async def probe_seeds(self, request: SampleRequest) -> None:
        """Check that the server honours seeds: two replies to one prompt with two seeds must differ.

        Raises:
            IdenticalSiblingsError: they are the same.
        """
        seeds = [derive(request.seed, "probe", number) for number in range(8)]
        asked = [
            SampleRequest(
                session=f"probe/{number}",
                engine_ids=request.engine_ids,
                images=request.images,
                seed=seed,
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
            )
            for number, seed in enumerate(seeds)
        ]
        replies = await self.generate(asked)
        if len({reply.token_ids for reply in replies}) == 1:
            raise IdenticalSiblingsError(
                "8 replies with 8 seeds are the same: the server does not honour sampling_seed; start it with "
                "--enable-deterministic-inference, or set sampler.sglang.deterministic to false"
            )


def _parsed(text: str) -> Mapping[str, object]:
    """An answer's JSON object; anything else is a fault of the server."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"HTTP 200 with an answer that is no JSON object: {text[:300]!r}")
    return cast("Mapping[str, object]", answer)
