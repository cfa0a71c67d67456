"""Weights between Hugging Face and Megatron: names, layouts, shards; one tensor at a time, bit for bit.

Megatron holds queries, keys and values of a layer in one tensor, group by group, and the gate and up projections of the
MLP in another; of both, and of most others, each tensor-parallel rank has a part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from polyturn.learner.megatron.config import DecoderFacts
from polyturn.policy.hf_weights import EMBEDDING, HEAD

_LANGUAGE, _VISUAL = "model.language_model.", "model.visual."
# Layers of TransformerEngine hold the norm before a projection with it.
_LAYER_NAMES = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_OTHER_NAMES = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": _LANGUAGE + "norm.weight",
    "output_layer.weight": HEAD,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class Holder(Protocol):
    """Whose weights these are; `MegatronPolicy` is one."""

    @property
    def language(self) -> GPTModel: ...
    @property
    def visual(self) -> nn.Module: ...
    @property
    def facts(self) -> DecoderFacts: ...
    @property
    def group(self) -> dist.ProcessGroup: ...


def detached(parameter: nn.Parameter) -> Tensor:
    """The weight itself."""
    return parameter.detach()


@torch.no_grad()
def hf_tensors(
    holder: Holder,
    pick: Callable[[nn.Parameter], Tensor] = detached,
    *,
    only_trained: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each Hugging Face weight; tied ones come one after the other (collective).

    `pick` gives what is exported of a parameter: this rank's part, of the parameter's shape (the weight, its gradient,
    the main weight). One tensor of Megatron's is gathered at a time; what a single rank holds alone is passed on as it
    is.
    """
    for name, parameter in holder.visual.named_parameters():
        if parameter.requires_grad or not only_trained:
            yield _VISUAL + name, pick(parameter)
    for name, parameter in holder.language.named_parameters():
        if parameter.requires_grad or not only_trained:
            layout = _Layout(hf_names(name), holder.facts, holder.group.size())
            yield from layout.taken_apart(_gathered(pick(parameter), parameter, holder.group))


@torch.no_grad()
def load_hf(
    holder: Holder,
    tensors: Mapping[str, Tensor],
    into: Callable[[nn.Parameter, Tensor], object] = nn.Parameter.copy_,
) -> None:
    """Give each parameter its part of the Hugging Face `tensors`; `into(parameter, part)` puts it there."""
    rank, num_ranks = holder.group.rank(), holder.group.size()
    for name, parameter in holder.visual.named_parameters():
        into(parameter, tensors[_VISUAL + name])
    for name, parameter in holder.language.named_parameters():
        layout = _Layout(hf_names(name), holder.facts, num_ranks)
        whole = layout.put_together([tensors[hf_name] for hf_name in layout.names])
        into(
            parameter,
            whole.chunk(num_ranks, split_dim(parameter))[rank] if is_split(parameter) else whole,
        )


def hf_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that one of Megatron's holds.

    >>> hf_names("decoder.layers.3.mlp.linear_fc2.weight")
    ('model.language_model.layers.3.mlp.down_proj.weight',)
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return (_OTHER_NAMES[name],)
    return tuple(f"{_LANGUAGE}layers.{found[1]}.{inner}" for inner in _LAYER_NAMES[found[2]])


def is_split(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks hold a part each."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def split_dim(parameter: nn.Parameter) -> int:
    """Along which dimension."""
    return int(getattr(parameter, "partition_dim"))  # noqa: B009


def _gathered(part: Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1 or not is_split(parameter):
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, split_dim(parameter))


@dataclass(frozen=True)
class _Layout:
    """How the Hugging Face tensors `names` lie in one of Megatron's, whose ranks' parts are its equal pieces."""

    names: tuple[str, ...]
    facts: DecoderFacts
    num_ranks: int

    def put_together(self, tensors: list[Tensor]) -> Tensor:
        """The Hugging Face tensors as Megatron's whole one."""
        if self._is_joined:
            return torch.cat([self._cut(t) for t in tensors], dim=1).flatten(0, 1)
        if self._is_vocabulary:
            missing = self.facts.padded_vocab_size(self.num_ranks) - len(tensors[0])
            return nn.functional.pad(tensors[0], (0, 0, 0, missing)) if missing else tensors[0]
        return tensors[0]

    def taken_apart(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The reverse, with the names; a tied head follows the embedding."""
        if self._is_joined:
            rows = whole.unflatten(0, (self._num_pieces, -1)).split(self._heights, dim=1)
            for name, tensor in zip(self.names, rows, strict=True):
                yield name, tensor.flatten(0, 1)
            return
        tensor = whole[: self.facts.vocab_size] if self._is_vocabulary else whole
        yield self.names[0], tensor
        if self.names[0] == EMBEDDING and self.facts.is_tied:
            yield HEAD, tensor

    @property
    def _is_joined(self) -> bool:
        return len(self.names) > 1

    @property
    def _is_vocabulary(self) -> bool:
        return self.names[0] in (EMBEDDING, HEAD)

    @property
    def _num_pieces(self) -> int:
        """Groups of queries with their key and value; of gate and up, ranks."""
        return self.facts.num_kv_heads if len(self.names) == 3 else self.num_ranks

    @property
    def _heights(self) -> list[int]:
        """Rows of each Hugging Face tensor in a piece."""
        facts = self.facts
        if len(self.names) == 3:
            return [facts.num_heads // facts.num_kv_heads * facts.head_dim, *[facts.head_dim] * 2]
        return [facts.ffn_size // self.num_ranks] * 2

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self._num_pieces, -1))
