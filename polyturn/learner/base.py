"""The learner protocol: logprobs, one optimizer update, weights out, state in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polyturn.types import TrainingSample

if TYPE_CHECKING:
    import torch


class NonFiniteError(RuntimeError):
    """Loss or gradients are not finite; the update was not applied."""


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer update did; `loss_metrics` are those of `polyturn.loss`, without their area.

    Of these, `train_rollout_logprob_abs_diff` compares the learner with the sampler; for the first update after a
    rollout the weights are the same, so that it measures numerics alone.
    """

    grad_norm: float
    lr: float
    num_tokens: int
    loss_metrics: Mapping[str, float]


class Learner(Protocol):
    """What trains: FSDP2 (also one CPU process) or Megatron-Core."""

    def update(
        self, samples: Sequence[TrainingSample], *, lr_scale: float, is_on_policy: bool
    ) -> UpdateStats:
        """One optimizer update over `samples`; see the implementation for `is_on_policy`.

        Raises:
            NonFiniteError: loss or gradients are not finite; the weights are as before.
        """
        ...

    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens, without training on them."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters under their Hugging Face names (collective)."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state."""
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...
