"""New weights to SGLang servers: over CUDA IPC, over NCCL, or through a directory; streamed in buckets.

Names are Hugging Face's; a server maps them to its own and fuses what it fuses. What it does not know, it passes
over silently, so that checksums after the update are part of every way (checksums.py).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from polyturn import directories
from polyturn.sampler.sglang.control import Control

logger = logging.getLogger(__name__)

Named = Iterator[tuple[str, Tensor]]


class Transfer(Protocol):
    """One way to push weights."""

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Give all servers the tensors and the version's name.

        Raises:
            ServerError: a server refuses; its weights are then of no use.
        """
        ...

    def forget(self) -> None:
        """A server was started anew: what was agreed on with it is gone."""
        ...

    def close(self) -> None:
        """End what the way holds open."""
        ...


def buckets(tensors: Named, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors in their order; a bucket stays within `max_bytes` unless a tensor alone is larger."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


@dataclass(frozen=True)
class TensorTransfer:
    """Handles of GPU memory over CUDA IPC: trainer and server share GPUs (update_weights_from_tensor).

    Tensors are cast to `dtype` and laid into one flat buffer a bucket. A buffer is kept until every server has
    answered, since the server reads the trainer's own memory. Each of a server's `num_ranks` processes gets a handle
    of its own in the one call.
    """

    dtype: torch.dtype
    max_bytes: int
    num_ranks: int

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Send bucket by bucket; only the last call carries the version."""
        from sglang.srt.utils import MultiprocessingSerializer  # noqa: PLC0415  (needs a GPU host)
        from sglang.srt.utils.patch_torch import (  # noqa: PLC0415
            monkey_patch_torch_reductions,
        )
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: PLC0415

        monkey_patch_torch_reductions()  # handles name a GPU by its UUID: indices differ between processes
        for bucket in buckets(_cast(tensors, self.dtype), self.max_bytes):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            torch.cuda.synchronize()
            content = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": flat.get_metadata(),
            }
            handles = [
                MultiprocessingSerializer.serialize(content, output_str=True)
                for _ in range(self.num_ranks)
            ]
            _call_all(
                servers,
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": handles,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "weight_version": str(version),
                },
            )

    def forget(self) -> None:
        """Nothing is agreed on."""

    def close(self) -> None:
        """Nothing is held."""


class DistributedTransfer:
    """Broadcasts over NCCL from this process to all ranks of all servers (update_weights_from_distributed).

    The group is of the servers that are there: it is made anew, under another name and at another port (`address`
    gives one), when one was started anew, has gone or has come back.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        num_ranks: int,
        address: Callable[[], tuple[str, int]],
    ) -> None:
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._num_ranks = num_ranks
        self._address = address
        self._group: object | None = None
        self._members: tuple[str, ...] = ()
        self._num_groups = 0

    @property
    def _name(self) -> str:
        return f"polyturn_weights_{self._num_groups}"

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Announce a bucket over HTTP and broadcast its tensors at the same time."""
        import torch.distributed as dist  # noqa: PLC0415

        members = tuple(server.url for server in servers)
        if self._group is None or members != self._members:
            self.close()
            self._num_groups += 1
            self._group, self._members = self._join(servers), members
        for bucket in buckets(_cast(tensors, self._dtype), self._max_bytes):
            content = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._name,
                "flush_cache": False,
                "weight_version": str(version),
            }
            with ThreadPoolExecutor(len(servers)) as pool:
                answers = [
                    pool.submit(server.call, "/update_weights_from_distributed", content)
                    for server in servers
                ]
                for _, tensor in bucket:
                    dist.broadcast(tensor.contiguous(), src=0, group=self._group)  # pyright: ignore[reportArgumentType]
                for answer in answers:
                    answer.result()

    def _join(self, servers: Sequence[Control]) -> object:
        from sglang.srt.utils import init_custom_process_group  # noqa: PLC0415

        host, port = self._address()
        world = 1 + len(servers) * self._num_ranks
        with ThreadPoolExecutor(len(servers)) as pool:
            answers = [
                pool.submit(
                    server.call,
                    "/init_weights_update_group",
                    {
                        "master_address": host,
                        "master_port": port,
                        "rank_offset": 1 + index * self._num_ranks,
                        "world_size": world,
                        "group_name": self._name,
                        "backend": "nccl",
                    },
                )
                for index, server in enumerate(servers)
            ]
            group = init_custom_process_group(
                backend="nccl",
                init_method=f"tcp://{host}:{port}",
                world_size=world,
                rank=0,
                group_name=self._name,
            )
            for answer in answers:
                answer.result()
        return group

    def forget(self) -> None:
        """The group lacks the new server."""
        self.close()

    def close(self) -> None:
        """Leave the group; the servers leave it when they end."""
        if self._group is not None:
            import torch.distributed as dist  # noqa: PLC0415

            dist.destroy_process_group(self._group)  # pyright: ignore[reportArgumentType]
            self._group = None


@dataclass(frozen=True)
class DiskTransfer:
    """A Hugging Face directory that the servers read too (update_weights_from_disk); for hosts without NCCL.

    `write` puts the given tensors into a directory that a model can be loaded from.
    """

    directory: Path
    write: Callable[[Path, Named], None]

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Write the version's directory, let all servers read it, remove the one before."""
        target = self.directory / f"version_{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        self.write(target, tensors)
        content = {
            "model_path": str(target.resolve()),
            "flush_cache": False,
            "weight_version": str(version),
        }
        _call_all(servers, "/update_weights_from_disk", content)
        for old in self.directory.glob("version_*"):
            if old != target:
                directories.remove(old)

    def forget(self) -> None:
        """Nothing is agreed on."""

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _cast(tensors: Named, dtype: torch.dtype) -> Named:
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype)


def _call_all(servers: Sequence[Control], path: str, content: Mapping[str, object]) -> None:
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for answer in [pool.submit(server.call, path, content) for server in servers]:
            answer.result()
