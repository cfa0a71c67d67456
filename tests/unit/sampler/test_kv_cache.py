"""The column cache: masks, rows that are kept or repeated, and columns written in place."""

from __future__ import annotations

import pytest
import torch

from polyturn.sampler.kv_cache import ColumnCache


def states(rows: int, columns: int, first: int) -> torch.Tensor:
    """Keys [rows, 1, columns, 1] whose value tells row and column."""
    row = torch.arange(rows)[:, None] * 100
    return (row + first + torch.arange(columns)).float()[:, None, :, None]


def make(rows: int) -> ColumnCache:
    return ColumnCache(1, rows, torch.device("cpu"))


def feed(cache: ColumnCache, is_real: list[list[int]], first: int) -> torch.Tensor:
    mask = cache.feed_mask(torch.tensor(is_real, dtype=torch.bool))
    new = states(len(is_real), len(is_real[0]), first)
    cache.update(new, -new, 0)
    cache.advance(len(is_real[0]))
    return mask[:, 0].int()


def test_a_real_token_sees_real_ones_before_it_and_a_filler_itself() -> None:
    cache = make(2)
    first = feed(cache, [[1, 1, 1], [0, 1, 1]], 0)
    assert first.tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
    ]
    second = feed(cache, [[1], [0]], 3)
    assert second.tolist() == [[[1, 1, 1, 1]], [[0, 1, 1, 1]]]
    third = feed(cache, [[1], [1]], 4)
    assert third.tolist() == [[[1, 1, 1, 1, 1]], [[0, 1, 1, 0, 1]]]


@pytest.mark.parametrize("room", [0, 1, 5])
def test_every_call_returns_all_columns_so_far(room: int) -> None:
    cache = make(1)
    feed(cache, [[1, 1]], 0)
    cache.select(torch.tensor([0]), room)
    for column in (2, 3):
        cache.feed_mask(torch.ones(1, 1, dtype=torch.bool))
        new = states(1, 1, column)
        keys, values = cache.update(new, -new, 0)
        cache.advance(1)
        assert keys.flatten().tolist() == list(range(column + 1))
        assert values.flatten().tolist() == [-c for c in range(column + 1)]
    assert cache.get_seq_length() == cache.length == 4


def test_selected_rows_are_repeated_in_order_with_their_valid_columns_at_the_right() -> None:
    """Columns that no kept row uses go: of four, the third is a filler in every kept row."""
    cache = make(3)
    feed(cache, [[1, 1, 1], [0, 1, 0], [1, 1, 0]], 0)
    feed(cache, [[1], [1], [1]], 3)
    cache.select(torch.tensor([2, 1, 1]), 2)
    assert cache.length == 3
    cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))
    keys, values = cache.update(states(3, 1, 9), -states(3, 1, 9), 0)
    cache.advance(1)
    mask = cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))[:, 0, 0].int()
    assert mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert keys[0, 0, :, 0].tolist() == [200, 201, 203, 9]
    assert keys[1, 0, 1:, 0].tolist() == [101, 103, 109]
    assert keys[2, 0, 1:, 0].tolist() == [101, 103, 209]
    assert torch.equal(values, -keys)


def test_rows_behind_the_active_ones_stay_as_they_are_and_can_come_back() -> None:
    cache = make(3)
    feed(cache, [[1, 1], [1, 1], [1, 1]], 0)
    cache.num_active = 2
    cache.swap(torch.tensor([0]), torch.tensor([2]))  # row 0 has ended: rows are now 2, 1, 0
    feed(cache, [[1], [1]], 2)
    cache.num_active = 1
    feed(cache, [[1]], 3)
    cache.select(torch.tensor([2, 0, 1]), 1)
    assert cache.length == 4
    cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))
    keys, _ = cache.update(states(3, 1, 7), states(3, 1, 7), 0)
    cache.advance(1)
    mask = cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))[:, 0, 0].int()
    assert mask[:, :5].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert keys[0, 0, 2:, 0].tolist() == [0, 1, 7]
    assert keys[1, 0, :, 0].tolist() == [200, 201, 2, 3, 107]
    assert keys[2, 0, 1:, 0].tolist() == [100, 101, 102, 207]
