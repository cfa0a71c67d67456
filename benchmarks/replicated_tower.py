"""The vision tower of tensor-parallel ranks with every picture encoded on each of them: what splitting them is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from polyturn.learner.megatron import policy
from polyturn.learner.megatron.tower import SplitTower
from polyturn.policy.vision import Features, encode
from polyturn.types import ImageRecord


class ReplicatedTower(SplitTower):
    """Runs the tower over all pictures of the group on every rank; gradients and features are those of a split one."""

    def _encoded(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        self.num_encoded += len(images)
        encoded = encode(self._policy, self._reader, images)
        for level in (level for features in encoded for level in features.levels):
            if level.requires_grad:
                level.register_hook(self._share)
        return {image.sha256: made for image, made in zip(images, encoded, strict=True)}

    def _share(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient that is whole on every rank: the stepper sums the tower's over the group."""
        return gradient / self._group.size()


@contextmanager
def replicated() -> Iterator[None]:
    """Megatron policies that are built inside have a replicated tower."""
    with patch.object(policy, "SplitTower", ReplicatedTower):
        yield
