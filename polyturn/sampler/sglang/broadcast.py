"""New weights to SGLang servers on other GPUs: broadcast over NCCL, in a group that lives as long as its members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _abort_process_group

from polyturn.sampler.sglang.control import Control
from polyturn.sampler.sglang.weights import Named, buckets, cast_all

logger = logging.getLogger(__name__)

_LEAVE_S = 15.0  # for all members of a group to end it


class DistributedTransfer:
    """Broadcasts over NCCL from this process to all ranks of all servers (update_weights_from_distributed).

    The group is of the servers that are there: it is made anew, under another name and at another port, when one was
    started anew, has gone or has come back. NCCL waits for ever for a server that has gone, so that whatever may wait
    for one runs beside this thread, and the group is given up at the first error.
    """

    def __init__(
        self, dtype: torch.dtype, max_bytes: int, num_ranks: int, backend: str = "nccl"
    ) -> None:
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._num_ranks = num_ranks
        self._backend = backend
        self._group: object | None = None
        self._members: tuple[Control, ...] = ()
        self._num_groups = 0

    @property
    def _name(self) -> str:
        return f"polyturn_weights_{self._num_groups}"

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Announce a bucket over HTTP and broadcast its tensors at the same time."""
        if self._group is None or tuple(servers) != self._members:
            self.forget()
            self._num_groups += 1
            self._group, self._members = self._join(servers), tuple(servers)
        try:
            for bucket in buckets(cast_all(tensors, self._dtype), self._max_bytes):
                self._send(bucket, version)
        except BaseException:
            self._leave(is_broken=True)
            raise

    def _send(self, bucket: Sequence[tuple[str, Tensor]], version: int) -> None:
        content = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": str(version),
        }
        first = bucket[0][1]
        stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
        sending = _aside(partial(_broadcast, bucket, self._group, stream))
        path = "/update_weights_from_distributed"
        _all_of([_aside(partial(server.call, path, content)) for server in self._members], sending)

    def _join(self, servers: Sequence[Control]) -> object:
        from sglang.srt.utils import init_custom_process_group  # noqa: PLC0415

        world = 1 + len(servers) * self._num_ranks
        # A store of its own, as under torchrun torch looks for one of the agent's at any address it is given.
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        content = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "world_size": world,
            "group_name": self._name,
            "backend": self._backend,
        }
        answers = [
            _aside(
                partial(
                    server.call,
                    "/init_weights_update_group",
                    {**content, "rank_offset": 1 + index * self._num_ranks},
                )
            )
            for index, server in enumerate(servers)
        ]
        made: list[object] = []
        making = _aside(
            lambda: made.append(
                init_custom_process_group(
                    backend=self._backend,
                    store=PrefixStore(self._name, store),
                    world_size=world,
                    rank=0,
                    group_name=self._name,
                )
            )
        )
        _all_of(answers, making)
        return made[0]

    def forget(self) -> None:
        """The group lacks the new server, and has a member that does not end it together with this process."""
        self._leave(is_broken=True)

    def close(self) -> None:
        """Leave the group."""
        self._leave(is_broken=False)

    def _leave(self, *, is_broken: bool) -> None:
        """End the group here and on its servers at the same time: NCCL waits for the other processes of the host."""
        group, self._group = self._group, None
        if group is None:
            return
        content = {"group_name": self._name}
        for server in self._members:  # one that has gone or is new does not know it
            told = Control(server.url, _LEAVE_S)
            _aside(partial(told.call, "/destroy_weights_update_group", content))
        end = _abort_process_group if is_broken else dist.destroy_process_group
        left = _aside(partial(end, cast("dist.ProcessGroup", group)))
        try:
            left.result(_LEAVE_S)
        except Exception as error:  # the group is not used again, whatever became of it
            logger.warning("left the group of weights: %s: %s", type(error).__name__, error)


def _broadcast(
    bucket: Sequence[tuple[str, Tensor]], group: object, stream: torch.cuda.Stream | None
) -> None:
    """Send from rank 0 in the order of the bucket, on the stream that made the tensors."""
    with torch.cuda.stream(stream) if stream else nullcontext():
        for _, tensor in bucket:
            dist.broadcast(tensor.contiguous(), src=0, group=cast("dist.ProcessGroup", group))


def _aside(work: Callable[[], object]) -> Future[None]:
    """Do it in a thread that holds up nobody, not even the end of this process."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised where the result is taken
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, daemon=True).start()
    return done


def _all_of(answers: Sequence[Future[None]], own: Future[None]) -> None:
    """Wait for all; the first error ends the wait, and a server's is told before this process's own."""
    wait([*answers, own], return_when=FIRST_EXCEPTION)
    for each in (*answers, own):
        if each.done():
            each.result()
