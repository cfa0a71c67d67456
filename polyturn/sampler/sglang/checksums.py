"""Whether a server holds the tensors that were pushed: hashes of both sides under the server's names."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from polyturn.sampler.sglang.control import Control, ServerError

VOCAB_MULTIPLE = 64  # rows of the server's vocabulary tables
FUSED = {  # the server's parameter -> the parts of ours that it stacks along dimension 0
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_ALWAYS_COMPARED = ("patch_embed", "visual.merger", "embed_tokens", "lm_head", "model.norm")


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


def is_compared(name: str, version: int, period: int) -> bool:
    """Whether a tensor of the server is compared after an update: with a period, each is every `period` versions.

    The ends of the vision tower, the embedding and the head are always: what goes wrong there is seen nowhere else.

    >>> [is_compared("model.layers.3.mlp.down_proj.weight", version, 4) for version in range(4)]
    [False, False, False, True]
    """
    is_end = any(part in name for part in _ALWAYS_COMPARED)
    return is_end or zlib.crc32(name.encode()) % period == version % period


class Checksums:
    """What /weights_checker of a server at tensor parallel 1 tells of our tensors: its name -> hash of the bytes.

    Parts that the server stacks are waited for; vocabulary rows are padded with zeros to a multiple of 64, as the
    server pads them. `chosen` says by the server's name what is hashed.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        hash_tensor: Callable[[Tensor], str],
        chosen: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._dtype = dtype
        self._hash_tensor = hash_tensor
        self._chosen = chosen
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash one of our tensors, or the stack that it completes."""
        renamed = server_name(name)
        for stack, parts in FUSED.items():
            for part in parts:
                if f".{part}." in renamed:
                    target = renamed.replace(f".{part}.", f".{stack}.")
                    if not self._chosen(target):
                        return
                    held = self._waiting.setdefault(target, {})
                    held[part] = tensor.detach().to(self._dtype)
                    if len(held) == len(parts):
                        del self._waiting[target]
                        whole = torch.cat([held[each] for each in parts])
                        self.sums[target] = self._hash_tensor(whole)
                    return
        if not self._chosen(renamed):
            return
        tensor = tensor.detach().to(self._dtype)
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
