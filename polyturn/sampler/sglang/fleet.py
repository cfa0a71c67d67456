"""The servers of a run: which one a trajectory is on, which have died, and how all get new weights."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyturn.sampler.sglang import checksums
from polyturn.sampler.sglang.control import Control, ServerError, check_version
from polyturn.sampler.sglang.process import ServerProcess
from polyturn.sampler.sglang.weights import Transfer
from polyturn.world import ONE, World

logger = logging.getLogger(__name__)

_LOOK_S = 10.0  # how long a silent server is asked for its health before it counts as dead


@dataclass
class Server:
    """One server; `process` is None where it was given by URL."""

    control: Control
    process: ServerProcess | None = None
    is_alive: bool = True


@dataclass
class Fleet:
    """All servers of a run and the way to push weights to them.

    Attributes:
        transfer: how weights travel.
        dtype: of the servers' weights.
        is_tied: the head is the embedding, so that servers hold one tensor for both.
        hash_tensor: the servers' hash, to compare checksums after a push (tensor parallel 1 only: shards have other
            bytes); None: not compared.
        check_tensors: about how many are compared after an update, after the first all; None: always all.
        restart: start a server anew in a dead one's place, at the same address; None where servers were given by URL.
        world: ranks that all sample from these servers; rank 0 alone starts them, pushes weights and ends them.
    """

    servers: Sequence[Server]
    transfer: Transfer
    dtype: torch.dtype
    is_tied: bool
    hash_tensor: Callable[[Tensor], str] | None
    check_tensors: int | None = None
    restart: Callable[[Server], None] | None = None
    world: World = ONE
    _released: bool = field(default=False)
    _num_tensors: int = 0  # that servers told of since one of them was new; 0: not known

    @property
    def _living(self) -> list[Server]:
        return [server for server in self.servers if server.is_alive]

    def pick(self, session: str, attempt: int = 0) -> Server | None:
        """The server of a trajectory: always the same while it lives, the next living one on later attempts."""
        living = self._living
        if not living:
            return None
        if attempt == 0:
            first = self.servers[zlib.crc32(session.encode()) % len(self.servers)]
            if first.is_alive:
                return first
        return living[(zlib.crc32(session.encode()) + attempt) % len(living)]

    async def look_at(self, server: Server) -> None:
        """After a failed request: is the server gone? Its launcher's end is known at once, silence only later."""
        if (
            server.process is not None and not server.process.is_running
        ) or not await asyncio.to_thread(server.control.is_healthy, _LOOK_S):
            server.is_alive = False
        if not server.is_alive:
            logger.error("%s is gone; its trajectories go on elsewhere", server.control.url)

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        """Push to all servers (the dead are started anew first); returns how many tensors were compared (collective).

        Raises:
            ServerError: see `SglangSampler.update_weights`.
        """
        failure: Exception | None = None
        compared = 0
        if self.world.is_main:
            try:
                compared = self._push(tensors, version)
            except Exception as error:  # raised below, when all ranks have gone through the tensors
                failure = error
        for _ in tensors:  # taking the tensors is collective
            pass
        with self.world.together():
            if failure is not None:
                raise failure
        living = self.world.broadcast([server.is_alive for server in self.servers])
        for server, is_alive in zip(self.servers, living, strict=True):
            server.is_alive = is_alive
        return compared

    def _push(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        self._notice_ends()
        self.resume()
        self._revive()
        controls = [server.control for server in self._living]
        if not controls:
            raise ServerError("no SGLang server is left to take weights")
        sums: dict[str, str] = {}
        self.transfer.push(controls, self._recorded(tensors, sums, version), version)
        for control in controls:
            control.flush_cache()
            told = control.weight_version()
            if told != str(version):
                raise ServerError(
                    f"{control.url} says weight version {told} after version {version} was pushed"
                )
        if not self.hash_tensor:
            return 0
        self._num_tensors = self._num_tensors or len(sums)
        return checksums.check_checksums(sums, controls)

    def release(self) -> None:
        """Free weights, keys and values of all servers, before any rank needs their memory (collective)."""
        with self.world.together():
            if self.world.is_main:
                self._notice_ends()
                for server in self._living:
                    server.control.flush_cache()
                    server.control.call("/release_memory_occupation", {})
                self._released = True

    def resume(self) -> None:
        """Allocate them again; contents are undefined until weights are pushed."""
        if self._released:
            for server in self._living:
                server.control.call("/resume_memory_occupation", {})
        self._released = False

    def close(self) -> None:
        """End what was started here."""
        if self.world.is_main:
            self.transfer.close()
        for server in self.servers:
            if server.process is not None:
                server.process.close()

    def check_versions(self) -> None:
        """Warn of servers whose SGLang is outside of the tested range."""
        for server in self.servers:
            told = check_version(server.control.version())
            if told is not None:
                logger.warning("%s: %s", server.control.url, told)

    def _notice_ends(self) -> None:
        """A server that ended while only another rank had asked it, or nobody."""
        for server in self.servers:
            if server.process is not None and not server.process.is_running:
                server.is_alive = False

    def _revive(self) -> None:
        """Start the dead anew; one that was given by URL may have come back by itself."""
        for server in self.servers:
            if server.is_alive:
                continue
            if self.restart is None:
                server.is_alive = server.control.is_healthy(_LOOK_S)
                continue
            logger.warning("starting %s anew", server.control.url)
            self.restart(server)
            server.is_alive = True
            self.transfer.forget()
            self._num_tensors = 0

    def _recorded(
        self, tensors: Iterator[tuple[str, Tensor]], sums: dict[str, str], version: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on in the servers' dtype; checksums of those to compare are put into `sums` on the way."""
        stacker = None
        if self.hash_tensor:
            period = max(1, self._num_tensors // (self.check_tensors or max(1, self._num_tensors)))
            stacker = checksums.Checksums(
                self.dtype,
                self.hash_tensor,
                lambda name: checksums.is_compared(name, version, period),
            )
        for name, given in tensors:
            if self.is_tied and name == "lm_head.weight":
                continue
            tensor = given.detach().to(self.dtype)
            if stacker is not None:
                stacker.add(name, tensor)
            yield name, tensor
        if stacker is not None:
            sums.update(stacker.sums)
