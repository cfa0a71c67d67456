"""Frees the GPU of a Megatron learner while others use it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from polyturn.learner.megatron.optimizer import Stepper
from polyturn.learner.offload import HostCopy


class DeviceMemory:
    """Weights, main weights and moments go to host memory and come back; gradients are dropped and come back as zeros.

    `others` are modules that are only looked up. Tensors stay the same objects.
    """

    def __init__(self, stepper: Stepper, others: Sequence[nn.Module]) -> None:
        self._stepper = stepper
        self._others = others
        self._host = HostCopy()
        self._gradient_bytes: list[int] = []

    @property
    def is_away(self) -> bool:
        """Whether the tensors have no memory at present."""
        return self._host.is_away

    def free(self) -> None:
        """Copy to the host and free the device's memory."""
        parts = self._stepper.parts.values()
        self._stepper.zero_gradients()
        self._host.take(
            [
                *(tensor for part in parts for tensor in part.tensors()),
                *(weight for module in self._others for weight in module.parameters()),
            ]
        )
        storages = [
            buffer.untyped_storage() for part in parts for buffer in part.gradient_buffers()
        ]
        self._gradient_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def take_back(self) -> None:
        """Undo `free`."""
        self._host.give_back()
        buffers = [b for part in self._stepper.parts.values() for b in part.gradient_buffers()]
        for buffer, size in zip(buffers, self._gradient_bytes, strict=True):
            buffer.untyped_storage().resize_(size)
            buffer.zero_()
