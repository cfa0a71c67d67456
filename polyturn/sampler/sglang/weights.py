"""New weights to SGLang servers: over CUDA IPC or through a directory, streamed in buckets (NCCL: broadcast.py).

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
        """Send bucket by bucket; each call names the version."""
        from sglang.srt.utils import MultiprocessingSerializer  # noqa: PLC0415  (needs a GPU host)
        from sglang.srt.utils.patch_torch import (  # noqa: PLC0415
            monkey_patch_torch_reductions,
        )
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: PLC0415

        monkey_patch_torch_reductions()  # handles name a GPU by its UUID: indices differ between processes
        for bucket in buckets(cast_all(tensors, self.dtype), self.max_bytes):
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


def cast_all(tensors: Named, dtype: torch.dtype) -> Named:
    """The tensors in the servers' dtype, one at a time."""
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype)


def _call_all(servers: Sequence[Control], path: str, content: Mapping[str, object]) -> None:
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for answer in [pool.submit(server.call, path, content) for server in servers]:
            answer.result()
