"""The layers of the decoder: whose they are, and what polyturn puts into them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from polyturn.learner.megatron import modules
from polyturn.learner.megatron.config import transformer_config
from polyturn.learner.megatron.modules import PackedCoreAttention, RmsNorm, block_spec
from polyturn.learner.megatron.weights import hf_names
from tests.unit.learner.megatron.cases import learner_params
from tests.unit.learner.megatron.facts import FACTS


def test_local_layers_hold_polyturns_attention_and_norms() -> None:
    block = block_spec(transformer_config(FACTS, learner_params()))
    assert isinstance(block, TransformerBlockSubmodules)
    layers = block.layer_specs or []
    assert len(layers) == FACTS.num_layers
    attention = layers[0].submodules.self_attention.submodules
    assert attention.core_attention is PackedCoreAttention
    assert attention.q_layernorm is attention.k_layernorm is block.layer_norm is RmsNorm


def test_transformer_engines_layers_are_taken_on_a_gpu_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own spec, of which only the attention is replaced; here another spec stands in for it."""
    stand_in = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    asked: list[bool] = []

    def of_transformer_engine(*, qk_layernorm: bool) -> object:
        asked.append(qk_layernorm)
        return stand_in

    monkeypatch.setattr(modules, "HAVE_TE", True)
    monkeypatch.setattr(
        modules, "get_gpt_layer_with_transformer_engine_spec", of_transformer_engine
    )
    config = transformer_config(FACTS, learner_params())
    assert block_spec(config) is not stand_in, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert block_spec(config) is stand_in
    assert asked == [True]
    attention = stand_in.submodules.self_attention.submodules
    assert attention.core_attention is PackedCoreAttention
    assert attention.q_layernorm is not RmsNorm


def test_norms_that_transformer_engine_holds_with_a_projection_have_hugging_faces_names() -> None:
    prefix = "model.language_model.layers.0."
    layer = "decoder.layers.0."
    assert hf_names(layer + "self_attention.linear_qkv.layer_norm_weight") == (
        prefix + "input_layernorm.weight",
    )
    assert hf_names(layer + "mlp.linear_fc1.layer_norm_weight") == (
        prefix + "post_attention_layernorm.weight",
    )


def test_the_norm_is_marked_for_the_sum_over_ranks_under_sequence_parallelism_alone() -> None:
    for is_split in (False, True):
        params = learner_params(num_processes=2, tensor_parallel=2, sequence_parallel=is_split)
        norm = RmsNorm(transformer_config(FACTS, params), 8, 1e-6)
        assert getattr(norm.weight, "sequence_parallel") == is_split  # noqa: B009
