"""polyturn.policy.tensor_cache: least recently used tensors go first."""

from __future__ import annotations

import torch

from polyturn.policy.tensor_cache import TensorCache


def tensors(value: int) -> tuple[torch.Tensor, ...]:
    return (torch.full((25,), float(value)),)  # 100 bytes


def test_the_least_recently_used_goes_first() -> None:
    cache = TensorCache(max_bytes=200)
    cache.put("a", tensors(1))
    cache.put("b", tensors(2))
    assert cache.get("a") is not None
    cache.put("c", tensors(3))
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert cache.get("c") is not None


def test_putting_again_replaces_and_counts_once() -> None:
    cache = TensorCache(max_bytes=200)
    for value in range(5):
        cache.put("a", tensors(value))
    cache.put("b", tensors(9))
    kept = cache.get("a")
    assert kept is not None
    assert kept[0][0] == 4
    assert cache.get("b") is not None


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = TensorCache(max_bytes=50)
    cache.put("a", tensors(1))
    assert cache.get("a") is None


def test_nothing_is_left_after_clear() -> None:
    cache = TensorCache(max_bytes=200)
    cache.put("a", tensors(1))
    cache.clear()
    assert cache.get("a") is None
