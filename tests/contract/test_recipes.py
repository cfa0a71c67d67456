"""Every overlay of recipes/ loads over params.yaml, and those for real hardware say what the field agreed on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polyturn.pipeline import workspace

ROOT = Path(__file__).resolve().parents[2]
REAL = {
    "qwen3_vl_2b": ("Qwen/Qwen3-VL-2B-Instruct", 32),
    "qwen3_vl_4b": ("Qwen/Qwen3-VL-4B-Instruct", 32),
    "qwen3_vl_8b": ("Qwen/Qwen3-VL-8B-Instruct", 32),
    "qwen2_5_vl_3b": ("Qwen/Qwen2.5-VL-3B-Instruct", 28),
    "qwen2_5_vl_7b": ("Qwen/Qwen2.5-VL-7B-Instruct", 28),
    "geo3k_single_turn": ("Qwen/Qwen3-VL-8B-Instruct", 32),
}


@pytest.mark.parametrize("name", workspace.recipe_names(ROOT))
def test_a_recipe_is_valid_over_params_yaml(name: str) -> None:
    assert workspace.compose(ROOT, recipe=name, overrides={}).changes


@pytest.mark.parametrize("name", workspace.recipe_names(ROOT))
def test_a_recipe_has_only_known_sections(name: str) -> None:
    overlay = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    assert set(overlay) <= set(yaml.safe_load((ROOT / "params.yaml").read_text()))


@pytest.mark.parametrize(("name", "model", "multiple"), [(k, *v) for k, v in REAL.items()])
def test_recipes_for_real_hardware_follow_the_published_ones(
    name: str, model: str, multiple: int
) -> None:
    params = workspace.compose(ROOT, recipe=name, overrides={}).params
    assert params.model.path == model
    assert params.images.size_multiple == multiple
    assert params.images.serve_host is None
    assert (params.rollout.prompts_per_step, params.rollout.group_size) == (64, 8)
    assert (params.rollout.max_new_tokens, params.rollout.temperature) == (4096, 1.0)
    assert (params.loss.clip_low, params.loss.clip_high) == (0.2, 0.28)
    assert params.learner.lr == 1e-6
    assert params.env.build.endswith("single_turn:build_env") == (name == "geo3k_single_turn")
    assert (params.rollout.max_turns == 1) == (name == "geo3k_single_turn")


def test_the_tiny_recipe_is_the_demo_made_small() -> None:
    tiny = workspace.compose(ROOT, recipe="tiny", overrides={}).params
    demo = workspace.compose(ROOT, recipe=None, overrides={}).params
    assert tiny.env == demo.env
    assert tiny.reward == demo.reward
    assert tiny.train.steps * tiny.rollout.prompts_per_step * tiny.rollout.group_size <= 16
