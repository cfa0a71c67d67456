"""Modules of a Megatron layer that polyturn brings itself, and the layer's spec around them.

Shapes: T tokens, H heads and K key and value heads of this rank, D head dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from polyturn.policy.attention import Packing, packed_attention


class PackedCoreAttention(nn.Module):
    """Attention of packed rows without TransformerEngine; where the samples lie comes as the attention mask."""

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__()
        self.scaling = softmax_scale or cast("int", config.kv_channels) ** -0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Packing, **_: object
    ) -> Tensor:
        """query [T, 1, H, D], key and value [T, 1, K, D] -> [T, 1, H D]."""
        rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = packed_attention(*rows, packing=attention_mask, scaling=self.scaling)
        return attended.transpose(0, 1).flatten(2)


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm; megatron-core's own wrapper refuses sequence parallelism.

    With it each rank sees a part of the tokens, and the mark makes megatron-core sum the weight's gradient over ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def block_spec(config: TransformerConfig) -> ModuleSpec:
    """megatron-core's own layers with polyturn's core attention; TransformerEngine's on a GPU if it is installed."""
    if HAVE_TE and torch.cuda.is_available():
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        cast("Any", layer.submodules).self_attention.submodules.core_attention = PackedCoreAttention
        return layer
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = cast("Any", layer.submodules)
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    norm = cast("Any", RmsNorm)
    block = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)
    return cast("ModuleSpec", block)  # GPTModel takes either, though its annotation says one
