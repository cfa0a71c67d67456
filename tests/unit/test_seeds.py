"""Derived seeds."""

from __future__ import annotations

from polyturn.seeds import derive


def test_equal_paths_give_equal_seeds_on_every_machine() -> None:
    assert derive(0, "sample", "p-1", 2, 0) == derive(0, "sample", "p-1", 2, 0)
    assert derive(0, "model") == 6349602971276943580


def test_other_paths_give_other_seeds() -> None:
    paths = [("a",), ("a", 1), ("a", "1"), ("a", "b"), ("ab",), ("a", 1, 2), ("a", 12), ()]
    seeds = {derive(0, *path) for path in paths} | {derive(1, "a")}
    assert len(seeds) == len(paths) + 1


def test_seeds_fit_into_63_bits() -> None:
    assert all(0 <= derive(seed, "x") < 2**63 for seed in range(50))
