"""New weights to SGLang servers: over CUDA IPC, over NCCL, or through a directory; streamed in buckets.

Names are Hugging Face's; a server maps them to its own and fuses what it fuses. What it does not know, it passes
over silently, so `check_names` and the checksums after the update are part of every way.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from polyturn.sampler.sglang.control import Control, ServerError

logger = logging.getLogger(__name__)

VOCAB_MULTIPLE = 64  # rows of the server's vocabulary tables
Named = Iterator[tuple[str, Tensor]]
FUSED = {  # the server's parameter -> the parts of ours that it stacks along dimension 0
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class Transfer(Protocol):
    """One way to push weights."""

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Give all servers the tensors and the version's name.

        Raises:
            ServerError: a server refuses; its weights are then of no use.
        """
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

    def close(self) -> None:
        """Nothing is held."""


class DistributedTransfer:
    """Broadcasts over NCCL from this process to all ranks of all servers (update_weights_from_distributed)."""

    GROUP = "polyturn_weights"

    def __init__(
        self, dtype: torch.dtype, max_bytes: int, num_ranks: int, address: tuple[str, int]
    ) -> None:
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._num_ranks = num_ranks
        self._address = address
        self._group: object | None = None

    def push(self, servers: Sequence[Control], tensors: Named, version: int) -> None:
        """Announce a bucket over HTTP and broadcast its tensors at the same time."""
        import torch.distributed as dist  # noqa: PLC0415

        if self._group is None:
            self._group = self._join(servers)
        for bucket in buckets(_cast(tensors, self._dtype), self._max_bytes):
            content = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self.GROUP,
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

        host, port = self._address
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
                        "group_name": self.GROUP,
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
                group_name=self.GROUP,
            )
            for answer in answers:
                answer.result()
        return group

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
                shutil.rmtree(old)

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.directory, ignore_errors=True)


def server_name(name: str) -> str:
    """The server's name of one of our parameters, before fusing.

    >>> server_name("model.language_model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> server_name("model.visual.blocks.0.attn.qkv.weight")
    'visual.blocks.0.attn.qkv_proj.weight'
    """
    if name.startswith("model.visual."):
        return name.removeprefix("model.").replace(".attn.qkv.", ".attn.qkv_proj.")
    return name.replace("model.language_model.", "model.")


class Checksums:
    """What /weights_checker of a server at tensor parallel 1 tells of our tensors: its name -> hash of the bytes.

    Parts that the server stacks are waited for; vocabulary rows are padded with zeros to a multiple of 64, as the
    server pads them.
    """

    def __init__(self, dtype: torch.dtype, hash_tensor: Callable[[Tensor], str]) -> None:
        self._dtype = dtype
        self._hash_tensor = hash_tensor
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash one of our tensors, or the stack that it completes."""
        renamed = server_name(name)
        tensor = tensor.detach().to(self._dtype)
        for stack, parts in FUSED.items():
            for part in parts:
                if f".{part}." in renamed:
                    target = renamed.replace(f".{part}.", f".{stack}.")
                    held = self._waiting.setdefault(target, {})
                    held[part] = tensor
                    if len(held) == len(parts):
                        del self._waiting[target]
                        whole = torch.cat([held[each] for each in parts])
                        self.sums[target] = self._hash_tensor(whole)
                    return
        if renamed in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % VOCAB_MULTIPLE))
        self.sums[renamed] = self._hash_tensor(tensor)


def engine_hash(tensor: Tensor) -> str:
    """The hash that an SGLang server of the installed version tells for a tensor."""
    from sglang.srt.managers.mm_utils import tensor_hash  # noqa: PLC0415  (needs a GPU host)

    return f"{tensor_hash(tensor):016x}"


def check_checksums(expected: Mapping[str, str], servers: Sequence[Control]) -> int:
    """Compare per-tensor checksums with those of every server; returns how many tensors were compared.

    Raises:
        ServerError: tensors differ, or some that were pushed are unknown to a server.
    """
    compared = 0
    for server in servers:
        answer = server.call("/weights_checker", {"action": "checksum"})
        for rank in cast("Sequence[Mapping[str, object]]", answer.get("ranks") or ()):
            theirs = cast("Mapping[str, str]", rank["checksums"])
            common = sorted(set(expected) & set(theirs))
            wrong = [name for name in common if expected[name] != theirs[name]]
            missing = sorted(set(expected) - set(theirs))
            if wrong or missing:
                raise ServerError(
                    f"{server.url}: after the weight update {len(wrong)} of {len(common)} tensors differ "
                    f"(first: {wrong[:3]}), {len(missing)} are unknown to the server (first: {missing[:3]})"
                )
            compared += len(common)
    if not compared:
        raise ServerError("no server told a checksum; set sampler.sglang.check_weights to false")
    return compared


def _cast(tensors: Named, dtype: torch.dtype) -> Named:
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype)


def _call_all(servers: Sequence[Control], path: str, content: Mapping[str, object]) -> None:
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        for answer in [pool.submit(server.call, path, content) for server in servers]:
            answer.result()
