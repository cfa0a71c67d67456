"""The column cache: masks, rows that are kept or repeated, and columns written in place."""

from __future__ import annotations

import torch

from polyturn.sampler.kv_cache import ColumnCache


def states(rows: int, columns: int, first: int) -> torch.Tensor:
    """Keys [rows, 1, columns, 1] whose value tells row and column."""
    row = torch.arange(rows)[:, None] * 100
    return (row + first + torch.arange(columns)).float()[:, None, :, None]


def feed(cache: ColumnCache, is_real: list[list[int]], first: int) -> torch.Tensor:
    mask = cache.feed_mask(torch.tensor(is_real, dtype=torch.bool))
    new = states(len(is_real), len(is_real[0]), first)
    cache.update(new, -new, 0)
    cache.advance(len(is_real[0]))
    return mask[:, 0].int()


def test_a_real_token_sees_real_ones_before_it_and_a_filler_itself() -> None:
    cache = ColumnCache(1)
    first = feed(cache, [[1, 1, 1], [0, 1, 1]], 0)
    assert first.tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
    ]
    second = feed(cache, [[1], [0]], 3)
    assert second.tolist() == [[[1, 1, 1, 1]], [[0, 1, 1, 1]]]
    third = feed(cache, [[1], [1]], 4)
    assert third.tolist() == [[[1, 1, 1, 1, 1]], [[0, 1, 1, 0, 1]]]


def test_every_call_returns_all_columns_so_far() -> None:
    for reserved in (0, 5):
        cache = ColumnCache(1)
        feed(cache, [[1, 1]], 0)
        cache.reserve(reserved)
        for column in (2, 3):
            cache.feed_mask(torch.ones(1, 1, dtype=torch.bool))
            new = states(1, 1, column)
            keys, values = cache.update(new, -new, 0)
            cache.advance(1)
            assert keys.flatten().tolist() == list(range(column + 1))
            assert values.flatten().tolist() == [-c for c in range(column + 1)]
        assert cache.get_seq_length() == cache.length == 4


def test_rows_are_kept_and_repeated_in_the_order_asked_for() -> None:
    cache = ColumnCache(1)
    feed(cache, [[1, 1], [0, 1], [1, 1]], 0)
    cache.reserve(3)
    cache.select(torch.tensor([2, 1, 1]))
    cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))
    keys, _ = cache.update(states(3, 1, 9), states(3, 1, 9), 0)
    assert keys[:, 0, :, 0].tolist() == [[200, 201, 9], [100, 101, 109], [100, 101, 209]]
    cache.advance(1)
    mask = cache.feed_mask(torch.ones(3, 1, dtype=torch.bool))
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
