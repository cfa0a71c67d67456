"""What a Qwen-VL's decoder is, read from its Hugging Face config, and the TransformerConfig that says the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig

from polyturn.learner.megatron.versions import MegatronError
from polyturn.params import LearnerParams
from polyturn.policy.model import DTYPES


@dataclass(frozen=True)
class DecoderFacts:
    """A dense decoder: N layers of grouped attention (H heads, K key and value heads of D) and a SwiGLU.

    `is_interleaved` tells Qwen3-VL's rotary layout, `has_qk_norm` and `has_qkv_bias` how queries and keys are made.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    is_interleaved: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    is_tied: bool

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """The vocabulary with rows of zeros up to a multiple of the ranks that share it."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def facts_of(config: PreTrainedConfig) -> DecoderFacts:
    """Read the facts off the config of a Qwen3-VL or Qwen2.5-VL.

    Raises:
        MegatronError: the decoder has something that is not built here.
    """
    text = config.text_config
    rope = cast("dict[str, object]", text.rope_parameters)
    for key, value, known in (
        ("rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("hidden_act", text.hidden_act, "silu"),
        ("use_sliding_window", getattr(text, "use_sliding_window", False), False),
    ):
        if value != known:
            raise MegatronError(
                f"model.path: {key} of the text config is {value!r}, which the Megatron learner does not build "
                f"(only {known!r}); use learner.backend: fsdp"
            )
    is_qwen3 = config.model_type == "qwen3_vl"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sections = cast("list[int]", rope["mrope_section"])
    return DecoderFacts(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        rope_theta=float(cast("float", rope["rope_theta"])),
        mrope_section=(sections[0], sections[1], sections[2]),
        is_interleaved=is_qwen3,
        has_qk_norm=is_qwen3,
        has_qkv_bias=not is_qwen3 or bool(text.attention_bias),
        is_tied=bool(config.tie_word_embeddings),
    )


def check_layout(facts: DecoderFacts, params: LearnerParams) -> None:
    """Refuse a layout of ranks that the decoder cannot be cut into.

    Raises:
        MegatronError: the message names the key.
    """
    ranks = params.tensor_parallel
    for name, number in (
        ("attention heads", facts.num_heads),
        ("units of the MLP", facts.ffn_size),
    ):
        if number % ranks:
            raise MegatronError(
                f"learner.tensor_parallel must divide the model's {number} {name}, got {ranks}"
            )
    if facts.num_kv_heads % ranks and ranks % facts.num_kv_heads:
        raise MegatronError(
            f"learner.tensor_parallel must divide the model's {facts.num_kv_heads} key and value heads or be a "
            f"multiple of them, got {ranks}"
        )


def transformer_config(facts: DecoderFacts, params: LearnerParams) -> TransformerConfig:
    """What megatron-core is told; no dropout, nothing fused that needs TransformerEngine or Apex.

    Gradients are summed over data-parallel ranks (`calculate_per_token_loss`): the loss is divided by the whole
    update's denominator already.
    """
    dtype = DTYPES[params.precision]
    return TransformerConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.ffn_size,
        num_attention_heads=facts.num_heads,
        num_query_groups=facts.num_kv_heads,
        kv_channels=facts.head_dim,
        tensor_model_parallel_size=params.tensor_parallel,
        sequence_parallel=params.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=params.precision == "bfloat16",
        normalization="RMSNorm",
        layernorm_epsilon=facts.norm_eps,
        qk_layernorm=facts.has_qk_norm,
        add_qkv_bias=facts.has_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        # Weights are loaded, never drawn: allocated in host memory, then moved.
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def rotary_axes(facts: DecoderFacts) -> Tensor:
    """Which of the three position axes (temporal, height, width) turns each frequency, [D / 2].

    Sections of 2, 1 and 1 frequencies are laid end to end in Qwen2.5-VL (T T H W) and interleaved in Qwen3-VL
    (T H W T), where what is left over is temporal.
    """
    section = facts.mrope_section
    if not facts.is_interleaved:
        return torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(section))
    axes = torch.zeros(facts.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : section[axis] * 3 : 3] = axis
    return axes


def rotary_angles(facts: DecoderFacts, position_ids: Tensor) -> Tensor:
    """M-RoPE angles of tokens at positions [3, T], in float32 as megatron-core wants them: [T, 1, 1, D]."""
    turns = _turns(facts, position_ids.device)
    angles = position_ids[turns.axes].T.float() * turns.frequencies
    return torch.cat([angles, angles], dim=-1)[:, None, None]


@dataclass(frozen=True)
class _Turns:
    """What turns a pair of channels: its axis and how fast, [D / 2] each."""

    axes: Tensor
    frequencies: Tensor


@functools.cache
def _turns(facts: DecoderFacts, device: torch.device) -> _Turns:
    exponents = torch.arange(0, facts.head_dim, 2, dtype=torch.float32) / facts.head_dim
    frequencies = 1.0 / facts.rope_theta**exponents
    return _Turns(rotary_axes(facts).to(device), frequencies.to(device))
