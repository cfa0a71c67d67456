"""M-RoPE positions: the worked example, and transformers' own on random layouts of both families."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyturn.policy.model import Policy
from polyturn.policy.positions import mrope_positions


def random_layout(
    rng: np.random.Generator, family_pad: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Text and pictures in a random order (pictures may stand first, last or side by side), text ids below 250."""
    ids: list[int] = []
    grids: list[tuple[int, int]] = []
    for _ in range(int(rng.integers(1, 6))):
        ids += rng.integers(0, 250, int(rng.integers(1, 7))).tolist()
        if rng.random() < 0.7:
            rows, columns = int(rng.integers(1, 6)), int(rng.integers(1, 6))
            grids.append((rows, columns))
            ids += [family_pad] * (rows * columns)
    return ids, grids


def test_text_counts_up_and_a_picture_spans_a_grid() -> None:
    positions = mrope_positions(np.array([5, 6, 9, 9, 7]), 9, [(1, 2)])
    assert positions.tolist() == [[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]]


def test_pictures_side_by_side_keep_their_own_grids() -> None:
    positions = mrope_positions(np.array([9] * 6), 9, [(2, 2), (1, 2)])
    assert positions.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_positions_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    policy: Policy = request.getfixturevalue(name)
    pad = policy.family.image_token_id
    rng = np.random.default_rng(0)
    for _ in range(60):
        ids, grids = random_layout(rng, pad)
        tokens = torch.tensor([ids])
        merge = policy.family.merge_size
        patches = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in grids])
        expected, _ = policy.model.model.get_rope_index(
            tokens,
            (tokens == pad).int(),
            image_grid_thw=patches if grids else None,
            attention_mask=torch.ones_like(tokens),
        )
        ours = mrope_positions(np.array(ids), pad, grids)
        assert ours.tolist() == expected[:, 0].tolist(), (ids, grids)


@pytest.mark.parametrize("grids", [[], [(1, 1)], [(1, 2), (1, 1)]])
def test_pads_that_are_not_the_pictures_cells_are_refused(grids: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="2 image tokens, but the pictures have"):
        mrope_positions(np.array([5, 9, 9]), 9, grids)
