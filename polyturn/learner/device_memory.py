"""Frees the GPU of a learner while others use it: learner.offload."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from polyturn.learner.offload import HostCopy

logger = logging.getLogger(__name__)


class Memory(Protocol):
    """What a learner holds on its device; its tensors stay the same objects."""

    @property
    def is_away(self) -> bool:
        """Whether the tensors have no memory at present."""
        ...

    def free(self) -> None:
        """Drop gradients, copy everything else to the host and free the device's memory."""
        ...

    def take_back(self) -> None:
        """Undo `free`; gradients are none or zeros."""
        ...


class ModuleMemory:
    """Weights and what torch's optimizer keeps; `others` are modules that are only looked up."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        others: Sequence[nn.Module],
    ) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._others = others
        self._host = HostCopy()

    @property
    def is_away(self) -> bool:
        """Whether the tensors have no memory at present."""
        return self._host.is_away

    def free(self) -> None:
        """Drop gradients, copy everything else to the host and free the device's memory."""
        self._optimizer.zero_grad(set_to_none=True)
        moments = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        others = [weight for module in self._others for weight in module.parameters()]
        self._host.take([*self._weights, *moments, *others])

    def take_back(self) -> None:
        """Undo `free`."""
        self._host.give_back()


class Offload:
    """Lends a learner's GPU between its updates if `is_wanted`; on a CPU it warns once and does nothing."""

    def __init__(self, memory: Memory, device: torch.device, *, is_wanted: bool) -> None:
        self._memory = memory
        self._is_on = is_wanted and device.type == "cuda"
        if is_wanted and not self._is_on:
            logger.warning("learner.offload: true does nothing on %s, only on a GPU", device)

    def out(self) -> float:
        """Free the GPU; seconds that it took."""
        if not self._is_on or self._memory.is_away:
            return 0.0
        started = time.monotonic()
        self._memory.free()
        torch.cuda.empty_cache()
        return time.monotonic() - started

    def back(self) -> float:
        """Undo `out`; seconds that it took."""
        if not self._memory.is_away:
            return 0.0
        started = time.monotonic()
        self._memory.take_back()
        return time.monotonic() - started

    def require_weights(self) -> None:
        """Nothing may use the weights between `out` and `back`."""
        assert not self._memory.is_away, "the learner is offloaded: onload() first"
