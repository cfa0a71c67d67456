"""The Qwen3-VL-2B shape with random weights, and what its training costs in floating point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from polyturn.params import SmallModelParams
from polyturn.policy import model, small_model
from polyturn.policy.model import Policy

# Qwen3-VL-2B-Instruct's config.json: 2.13 G parameters with a tied head. `rows` are of the embedding.
PATCH, MERGE, PIXELS = 16, 2, 448 * 448


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-VL."""

    rows: int
    width: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vision_width: int
    vision_feed_forward: int
    vision_layers: int
    vision_heads: int
    deepstack: tuple[int, ...]


QWEN3_VL_2B = Shape(
    151_936, 2048, 6144, 28, 16, 8, 128, 1024, 4096, 24, 16, (5, 11, 17)
)  # fmt: skip
TINY = Shape(1024, 64, 128, 2, 4, 2, 16, 32, 64, 2, 2, (0,))


def tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """A small byte-level BPE with Qwen's special tokens; the model's other rows are never shown."""
    return small_model.train_tokenizer(texts, 400)


def cast_parameters(network: nn.Module, dtype: torch.dtype) -> None:
    """Parameters, not buffers: rotary frequencies stay float32, as wherever a model is loaded."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def policy(shape: Shape, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Policy:
    """A policy of that shape with random weights, made on `device`."""
    own = tokenizer(["Answer: 12", "What is x?"])
    half = shape.head_dim // 2
    section = half * 5 // 16
    ids = {name: own.convert_tokens_to_ids(name) for name in model.IMAGE_TOKENS}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": shape.rows,
            "hidden_size": shape.width,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": own.convert_tokens_to_ids(model.END_OF_TURN),
            "pad_token_id": own.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [half - 2 * section, section, section],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_width,
            "intermediate_size": shape.vision_feed_forward,
            "num_heads": shape.vision_heads,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": shape.width,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(shape.deepstack),
        },
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            network = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    pictures = SmallModelParams(
        patch_size=PATCH, image_pixels=PIXELS, image_mean=0.5, image_std=0.5
    )
    cast_parameters(network, dtype)
    return model.wrap(network, small_model.build_processor(pictures, own))


@dataclass(frozen=True)
class Work:
    """What one training step runs, in tokens and patches."""

    tokens: int  # that pass the decoder's layers
    scored: int  # that pass the head
    attended: int  # pairs of a query and a key, over all samples (causal ones only)
    patches: int
    pictures: int


def training_flops(shape: Shape, work: Work) -> dict[str, float]:
    """Operations of forward and backward pass (3 x forward), by part; two for each multiply-add, none for recomputation.

    Source: the count of PaLM (arXiv:2204.02311), appendix B, without its approximation by parameters.
    """
    qkv = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    layer = (
        shape.width * (qkv + 3 * shape.feed_forward) + shape.head_dim * shape.heads * shape.width
    )
    vision_layer = 4 * shape.vision_width**2 + 2 * shape.vision_width * shape.vision_feed_forward
    merged = shape.vision_width * MERGE**2
    merger = merged * merged + merged * shape.width
    patches = work.patches / max(1, work.pictures)
    vision = work.patches * (
        shape.vision_layers * vision_layer
        + 3 * 2 * PATCH**2 * shape.vision_width
        + (1 + len(shape.deepstack)) * merger / MERGE**2
    )
    vision += work.patches * patches * 2 * shape.vision_width * shape.vision_layers
    parts = {
        "layers": work.tokens * shape.layers * layer,
        "head": work.scored * shape.width * shape.rows,
        "attention": work.attended * 2 * shape.heads * shape.head_dim * shape.layers,
        "vision": vision,
    }
    return {name: 6.0 * value for name, value in parts.items()}
