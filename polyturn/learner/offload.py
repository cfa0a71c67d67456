"""Moves tensors' memory to the host and back, while the tensors themselves stay the same objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a whole one is its own part."""
    return cast("Tensor", tensor.to_local()) if isinstance(tensor, DTensor) else tensor


class HostCopy:
    """Keeps the contents of tensors in host memory while their own memory is free for others.

    Views, sharded parameters and optimizer state go on sharing what they shared. Host buffers are pinned for a
    GPU and kept for the next time.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._away: list[torch.UntypedStorage] = []

    @property
    def is_away(self) -> bool:
        """Whether the tensors have no memory at present."""
        return bool(self._away)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and free the tensors' memory; they must not be used until `give_back`."""
        assert not self._away, "what was taken has not been given back"
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = local(tensor.detach()).untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
        self._away = list(storages.values())
        self._buffers = [self._buffer(*indexed) for indexed in enumerate(self._away)]
        for storage, buffer in zip(self._away, self._buffers, strict=True):
            buffer.copy_(_bytes(storage), non_blocking=True)
        _wait()
        for storage in self._away:
            storage.resize_(0)

    def give_back(self) -> None:
        """Give the tensors memory again, with the contents that they had."""
        for storage, buffer in zip(self._away, self._buffers, strict=True):
            storage.resize_(len(buffer))
            _bytes(storage).copy_(buffer, non_blocking=True)
        _wait()
        self._away = []

    def _buffer(self, index: int, storage: torch.UntypedStorage) -> Tensor:
        kept = self._buffers[index] if index < len(self._buffers) else None
        if kept is not None and len(kept) == storage.nbytes():
            return kept
        is_pinned = storage.device.type == "cuda"
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
