"""Operations counted by hand, and what a step executes of them."""

from __future__ import annotations

import doctest

import pytest

from polyturn.policy import flops
from polyturn.policy.flops import Work, count

CONFIG = {
    "text_config": {
        "hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 4,
        "num_hidden_layers": 1, "vocab_size": 10,
    },
    "vision_config": {
        "hidden_size": 4, "intermediate_size": 8, "depth": 1, "patch_size": 2, "spatial_merge_size": 2,
        "temporal_patch_size": 1, "in_channels": 1, "deepstack_visual_indexes": [],
    },
}  # fmt: skip


def work(**changes: float) -> Work:
    nothing = {"tokens": 0, "mean_length": 0, "scored": 0, "patches": 0, "patches_per_picture": 0}
    return Work(**{**nothing, **changes})


def test_examples_hold():
    assert doctest.testmod(flops).failed == 0


def test_a_token_costs_two_operations_per_weight_and_a_score_the_head():
    # q, k, v: 2 x 6; output: 2 x 2; gate, up, down: 3 x 2 x 4 -> 40 multiply-adds. Head: 2 x 10.
    assert count(CONFIG, work(tokens=5)).text == 5 * 80
    assert count(CONFIG, work(scored=3)).text == 3 * 40
    # Causal attention over sequences of 6: each token sees 3 on average, scores and values are 2 wide each.
    assert count(CONFIG, work(tokens=1, mean_length=6)).text == 80 + 2 * 3 * 2 * 2


def test_a_patch_costs_embedding_layer_merger_and_attention_over_its_picture():
    # embedding 1 x 2 x 2 x 4 = 16; layer 4 x 16 + 2 x 4 x 8 = 128; merger (16 x 16 + 16 x 2) / 4 = 72.
    assert count(CONFIG, work(patches=1)).vision == 2 * (16 + 128 + 72)
    assert count(CONFIG, work(patches=1, patches_per_picture=9)).vision == 2 * (216 + 2 * 4 * 9)


@pytest.mark.parametrize(
    ("is_frozen", "recomputes", "expected"),
    [(False, False, 30 + 3), (True, False, 30 + 1), (True, True, 40 + 1), (False, True, 40 + 4)],
)
def test_an_update_executes_backward_and_recomputed_passes_and_none_of_a_frozen_tower(
    is_frozen: bool, recomputes: bool, expected: float
):
    passes = flops.Passes(text=10, vision=1)
    assert passes.update(is_vision_frozen=is_frozen, recomputes=recomputes) == expected
