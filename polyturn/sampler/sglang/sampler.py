"""The sampler over SGLang servers: a trajectory stays on its server, faults are retried, weights are checked."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import aiohttp
from torch import Tensor

from polyturn.params import SglangParams
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.sglang import wire
from polyturn.sampler.sglang.control import ServerError
from polyturn.sampler.sglang.counts import SglangCounts, Trails, added
from polyturn.sampler.sglang.fleet import Fleet, Server
from polyturn.sampler.sglang.wires import Wires
from polyturn.seeds import derive

logger = logging.getLogger(__name__)

PROBE_SEEDS, PROBE_TOKENS, PROBE_TEMPERATURE = 8, 8, 5.0
_BUSY = (
    429,
    503,
)  # a full queue, or a router whose servers are all away: the same request is taken later
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0  # before a busy server is asked again


class BusyServerError(ServerError):
    """A server takes no more requests at present."""


class IdenticalSiblingsError(ServerError):
    """Siblings came out the same: the server does not honour seeds."""


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
    _trails: Trails = field(default_factory=Trails)
    _are_seeds_checked: bool = False
    # Of this sampler alone: a server that was given by URL may know pictures from another run's tower.
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Sample one reply per request, in the order of the requests, all in flight together.

        A request that fails on its server is tried again (`retries`), on another server if there is one; a server that is
        busy is asked again until `request_timeout_s` have passed. What remains failed comes back with finish_reason
        "error".
        """
        asked = (self._open().submit(self._one(request)) for request in requests)
        return list(await asyncio.gather(*asked))

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push weights to all servers, empty their prefix caches, and compare checksums (collective).

        The first time, deterministic servers are asked whether they honour seeds; see `probe_seeds`.

        Raises:
            ServerError: a server refuses, tells another version afterwards, holds other tensors or ignores seeds.
        """
        started = time.monotonic()
        self.counts.tensors_compared += self.fleet.update_weights(tensors, version)
        self._version = version
        self._trails.clear()
        self.counts.weight_sync_s += time.monotonic() - started
        if self.params.deterministic and not self._are_seeds_checked:
            with self.fleet.world.together():
                if self.fleet.world.is_main:
                    self.probe_seeds()
            self._are_seeds_checked = True

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
                answer = await self._answer(server, request)
            except BusyServerError as error:
                failure = f"{server.control.url}: {error}, for sampler.sglang.request_timeout_s"
                break
            except (aiohttp.ClientError, TimeoutError, ServerError) as error:
                failure = f"{server.control.url}: {type(error).__name__}: {error}"
                logger.warning("reply %s, attempt %d: %s", request.session, attempt + 1, failure)
                await self.fleet.look_at(server)
                continue
            return self._reply(answer, request)
        self.counts.failures += 1
        return self._failed(f"{failure} (after sampler.sglang.retries {self.params.retries})")

    async def _answer(self, server: Server, request: SampleRequest) -> Mapping[str, object]:
        """What a server answers; one that is busy is asked again for sampler.sglang.request_timeout_s.

        Raises:
            BusyServerError: it was busy for that long.
        """
        wait_s, waited_s = _FIRST_WAIT_S, 0.0
        while True:
            try:
                async with self._open().limit:
                    return await self._post(server, request)
            except BusyServerError:
                if waited_s + wait_s > self.params.request_timeout_s:
                    raise
            self.counts.waits += 1
            await asyncio.sleep(wait_s)
            waited_s += wait_s
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _reply(self, answer: Mapping[str, object], request: SampleRequest) -> Reply:
        try:
            reply = wire.reply(answer, version=self._version)
        except wire.WireError as error:
            self.counts.failures += 1
            logger.warning("reply %s: %s", request.session, error)
            return self._failed(str(error))
        turn, cached = self._trails.turn(request), wire.num_cached(answer)
        self.counts.prompt_tokens[turn] += reply.prompt_length
        self.counts.cached_tokens[turn] += cached
        self.counts.replies += 1
        latency_s = wire.latency_s(answer)
        self.counts.latency_s += latency_s
        self.counts.longest_s = max(self.counts.longest_s, latency_s)
        if cached < self._trails.reusable(request):
            self._recomputed(request)
        self._trails.add(request, reply)
        return reply

    def _recomputed(self, request: SampleRequest) -> None:
        """Keys and values of sampled tokens are other bytes when they are computed as a prompt."""
        self.counts.recomputed_turns += 1
        if self.params.deterministic:
            logger.warning(
                "%s: a server lost the keys and values of earlier turns, so that this step may not come out the same "
                "again; raise sampler.sglang.memory_fraction or lower rollout.prompts_per_step",
                request.session,
            )

    async def _post(self, server: Server, request: SampleRequest) -> Mapping[str, object]:
        rid = uuid.uuid4().hex  # of one length: /abort_request takes prefixes
        tower = self._key if self.is_vision_frozen else f"{self._key}/{self._version}"
        content = wire.body(request, self.settings, self._uris, rid=rid, tower=tower)
        url = f"{server.control.url}/generate"
        try:
            async with self._open().session.post(url, json=content) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    kind = BusyServerError if response.status in _BUSY else ServerError
                    raise kind(f"HTTP {response.status}: {text[:300]}")
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
            share = max(1, self.params.max_concurrency // self.fleet.world.size)
            self._wires = Wires(self.params.request_timeout_s, share)
        return self._wires

    def probe_seeds(self) -> None:
        """Check that the servers honour seeds: replies to one prompt with several seeds must differ.

        At a high temperature, so that a policy which is sure of itself does not look like a server that ignores seeds.

        Raises:
            IdenticalSiblingsError: they are the same.
        """
        asked = [
            SampleRequest(
                session=f"probe/{number}",
                engine_ids=self.settings.stop_ids[:1] * 4,
                images=(),
                seed=derive(0, "probe", number),
                max_new_tokens=PROBE_TOKENS,
                temperature=PROBE_TEMPERATURE,
            )
            for number in range(PROBE_SEEDS)
        ]
        kept, self.counts = self.counts, SglangCounts()  # these replies are no rollout's
        try:
            replies = self._open().run(self._all(asked))
        finally:
            self.counts = kept
        if failed := [reply.error for reply in replies if reply.finish_reason == "error"]:
            raise ServerError(f"seeds could not be checked: {failed[0]}")
        if len({reply.token_ids for reply in replies}) == 1:
            raise IdenticalSiblingsError(
                f"{PROBE_SEEDS} replies with {PROBE_SEEDS} seeds are the same: the server does not honour "
                "sampling_seed; start it with --enable-deterministic-inference, or set sampler.sglang.deterministic "
                "to false"
            )

    async def _all(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))


def _parsed(text: str) -> Mapping[str, object]:
    """An answer's JSON object; anything else is a fault of the server."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"HTTP 200 with an answer that is no JSON object: {text[:300]!r}")
    return cast("Mapping[str, object]", answer)
