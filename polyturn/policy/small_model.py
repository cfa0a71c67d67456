"""Builds the small Qwen3-VL: config, byte-level BPE trained on given texts, chat template with tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import cast

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from polyturn.params import SmallModelParams
from polyturn.policy.processor import (
    END_OF_TURN,
    IMAGE_PAD,
    PADDING,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    ImageOnlyQwen3VLProcessor,
)

MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
# Qwen's added tokens, in Qwen's order; the flag says whether `skip_special_tokens` hides them.
ADDED_TOKENS = (
    (PADDING, True),
    ("<|im_start|>", True),
    (END_OF_TURN, True),
    (VISION_START, True),
    (VISION_END, True),
    (IMAGE_PAD, True),
    (VIDEO_PAD, True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

# Qwen's chat format (ChatML, Hermes tool calls, tool answers inside a user message, pictures in any message).
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' -%}{{ show(messages[0].content) }}

{% endif -%}
# Tools
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
Call one as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ show(messages[0].content) }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ show(message.content) }}</tool_response><|im_end|>
{% elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ show(message.content) }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE with Qwen's pre-tokenizer on `texts` and add Qwen's special tokens.

    Every byte has a token, so that any text round-trips. Equal texts give equal tokenizers.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    construct = cast("Callable[..., Qwen2Tokenizer]", Qwen2Tokenizer)
    tokenizer = construct(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=None,
        eos_token=PADDING,
        pad_token=PADDING,
    )
    added: list[str | AddedToken] = [
        AddedToken(token, special=special, normalized=False) for token, special in ADDED_TOKENS
    ]
    tokenizer.add_tokens(added)
    # Set after add_tokens: as a constructor argument it would be added first and shift the ids.
    tokenizer.eos_token = END_OF_TURN
    tokenizer.model_max_length = 32_768
    return tokenizer


def build_processor(
    params: SmallModelParams, tokenizer: Qwen2Tokenizer
) -> ImageOnlyQwen3VLProcessor:
    """The processor of the small model; it shrinks every picture to `image_pixels`."""
    side = params.patch_size * MERGE_SIZE
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=params.patch_size,
        merge_size=MERGE_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        image_mean=[params.image_mean] * 3,
        image_std=[params.image_std] * 3,
        size={"shortest_edge": side * side, "longest_edge": params.image_pixels},
    )
    return ImageOnlyQwen3VLProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE)


def build_model(
    params: SmallModelParams, tokenizer: Qwen2Tokenizer, *, seed: int, max_positions: int
) -> Qwen3VLForConditionalGeneration:
    """The small Qwen3-VL with random weights drawn from `seed` (float32)."""
    token_id = cast("Callable[[str], int]", tokenizer.convert_tokens_to_ids)
    half = params.head_dim // 2
    section = half * 5 // 16
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": params.hidden_size,
        "intermediate_size": params.intermediate_size,
        "num_hidden_layers": params.num_layers,
        "num_attention_heads": params.num_heads,
        "num_key_value_heads": params.num_kv_heads,
        "head_dim": params.head_dim,
        "max_position_embeddings": max_positions,
        "initializer_range": params.init_std,
        "tie_word_embeddings": params.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": token_id(END_OF_TURN),
        "pad_token_id": token_id(PADDING),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * section, section, section],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": params.vision_num_layers,
        "hidden_size": params.vision_hidden_size,
        "intermediate_size": params.vision_intermediate_size,
        "num_heads": params.vision_num_heads,
        "patch_size": params.patch_size,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "out_hidden_size": params.hidden_size,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": list(params.deepstack_layers),
        "initializer_range": params.init_std,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=params.tie_embeddings,
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = token_id(END_OF_TURN)
    model.generation_config.pad_token_id = token_id(PADDING)
    return model
