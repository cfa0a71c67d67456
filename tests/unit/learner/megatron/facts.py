"""The facts of a decoder for tests that need no model."""

from __future__ import annotations

from polyturn.learner.megatron.config import DecoderFacts

FACTS = DecoderFacts(
    num_layers=2,
    hidden_size=64,
    ffn_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=501,
    max_positions=128,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    mrope_section=(2, 1, 1),
    is_interleaved=True,
    has_qk_norm=True,
    has_qkv_bias=False,
    is_tied=True,
)
