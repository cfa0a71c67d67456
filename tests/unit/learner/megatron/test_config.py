"""What the decoder is told of itself: rotary layouts against Hugging Face, and what is refused with its reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from polyturn.learner.megatron import config, versions
from polyturn.learner.megatron.versions import MegatronError
from polyturn.params import ModelParams
from polyturn.policy import model
from polyturn.policy.model import ModelError, Policy
from tests.unit import tiny
from tests.unit.learner.megatron.cases import learner_params
from tests.unit.learner.megatron.facts import FACTS

POLICIES: dict[str, Callable[[], Policy]] = {"Qwen3-VL": tiny.qwen3, "Qwen2.5-VL": tiny.qwen2_5}


@pytest.mark.parametrize("name", POLICIES)
def test_rotary_angles_are_those_of_hugging_face(name: str) -> None:
    """Qwen2.5-VL gives its attention all three axes and picks sections there; positions of the axes differ."""
    policy = POLICIES[name]()
    facts = config.facts_of(policy.model.config)
    positions = torch.stack([torch.arange(9), torch.arange(9) * 3 + 1, 50 - torch.arange(9)])
    angles = config.rotary_angles(facts, positions)
    assert angles.shape == (9, 1, 1, facts.head_dim)
    decoder = policy.model.model.language_model
    cos, sin = decoder.rotary_emb(torch.zeros(1), positions[:, None])
    if name == "Qwen2.5-VL":
        assert len(cos) in (1, 3)  # newer transformers pick the sections there already
    if len(cos) == 3:
        sections = [*facts.mrope_section, *facts.mrope_section]
        cos, sin = (
            torch.cat([part[i % 3] for i, part in enumerate(x.split(sections, dim=-1))], dim=-1)
            for x in (cos, sin)
        )
    torch.testing.assert_close(angles.cos()[:, 0, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin()[:, 0, 0], sin[0], rtol=0, atol=1e-6)


def test_layouts_of_the_docstring() -> None:
    facts = replace(FACTS, head_dim=8, mrope_section=(2, 1, 1))
    assert config.rotary_axes(facts).tolist() == [0, 1, 2, 0]
    assert config.rotary_axes(replace(facts, is_interleaved=False)).tolist() == [0, 0, 1, 2]


def test_facts_of_both_families() -> None:
    three = config.facts_of(tiny.qwen3().model.config)
    assert (three.is_interleaved, three.has_qk_norm, three.has_qkv_bias) == (True, True, False)
    assert (three.num_heads, three.num_kv_heads, three.head_dim) == (2, 1, 32)
    older = config.facts_of(tiny.qwen2_5().model.config)
    assert (older.is_interleaved, older.has_qk_norm, older.has_qkv_bias) == (False, False, True)
    assert older.head_dim == 32


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    assert [FACTS.padded_vocab_size(ranks) for ranks in (1, 2, 3, 4)] == [501, 502, 501, 504]


@pytest.mark.parametrize("ranks", [3, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    params = learner_params(num_processes=ranks, tensor_parallel=ranks)
    with pytest.raises(
        MegatronError, match=f"must divide the model's 8 attention heads, got {ranks}"
    ):
        config.check_layout(FACTS, params)


def test_ranks_may_share_a_key_head_but_not_cut_across_several() -> None:
    params = learner_params(num_processes=4, tensor_parallel=4)
    config.check_layout(replace(FACTS, num_kv_heads=2), params)
    config.check_layout(FACTS, params)
    six = replace(FACTS, num_heads=24, num_kv_heads=6)
    with pytest.raises(MegatronError, match="6 key and value heads or be a multiple of them"):
        config.check_layout(six, params)
    with pytest.raises(MegatronError, match="130 units of the MLP, got 4"):
        config.check_layout(replace(FACTS, ffn_size=130), params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.rope_parameters.update(rope_type="yarn"), "rope_type .* is 'yarn'"),
        (lambda text: setattr(text, "hidden_act", "gelu"), "hidden_act .* is 'gelu'"),
        (lambda text: setattr(text, "use_sliding_window", True), "use_sliding_window .* is True"),
    ],
)
def test_a_decoder_that_is_not_built_is_refused(
    change: Callable[[PreTrainedConfig], None], message: str
) -> None:
    changed = copy.deepcopy(tiny.qwen2_5().model.config)
    change(changed.text_config)
    with pytest.raises(MegatronError, match=message):
        config.facts_of(changed)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_mixture_of_experts_is_refused_with_the_reason(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=r"mixture of experts, which is not trained: .* collapses"):
        model.load(ModelParams(), tmp_path)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.19.2"])
def test_versions_that_work(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.14.0", "0.14.1", "0.16.0", "0.20.0", "1.0"])
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(MegatronError, match=f">=0.16.1,<0.20, got {version}") as caught:
        versions.check(version)
    assert ("nothing is learned" in str(caught.value)) == version.startswith("0.1")


def test_the_installed_version_works() -> None:
    versions.check()


def test_a_missing_megatron_core_is_told_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.importlib.metadata, "version", missing)
    with pytest.raises(MegatronError, match="not installed; pip install"):
        versions.check()
