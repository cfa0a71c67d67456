"""A cache of tensors by key that forgets the least recently used beyond a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

import torch

Tensors = tuple[torch.Tensor, ...]


class TensorCache:
    """Keeps tuples of tensors up to `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, Tensors] = OrderedDict()

    def get(self, key: str) -> Tensors | None:
        """What was put under `key`, if it is still there."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: str, tensors: Tensors) -> None:
        """Keep `tensors`; the least recently used go when there is no room."""
        self._num_bytes += _size(tensors) - _size(self._kept.pop(key, ()))
        self._kept[key] = tensors
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._num_bytes = 0


def _size(tensors: Tensors) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
