"""The learner protocol: logprobs, one optimizer update, weights out, state in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from polyturn.types import TrainingSample

if TYPE_CHECKING:
    import torch

Logprobs = npt.NDArray[np.float32]  # [T] of one sample, 0 where it is not trained


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
    """What trains: FSDP2 (also one CPU process) or Megatron-Core.

    Every rank calls every method, with all samples; each takes its share and all return the same.
    """

    @property
    def shares_weights(self) -> bool:
        """Whether the policy's own modules are trained in place, so that a sampler may use them as they are."""
        ...

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        lr_scale: float,
        is_on_policy: bool,
        old_logprobs: Sequence[Logprobs] | None = None,
    ) -> UpdateStats:
        """One optimizer update over `samples`.

        With `is_on_policy` the old logprobs are the learner's own, detached (the ratio is 1 and its gradient that of the
        policy gradient); else they are `old_logprobs`, one array for each sample, or without these the sampler's.

        Raises:
            NonFiniteError: loss, a metric of it or gradients are not finite, on every rank; weights are as before.
        """
        ...

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """The present policy's logprobs of the trained tokens of each sample."""
        ...

    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens, without training on them."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters, whole, under their Hugging Face names; every rank has to take them all."""
        ...

    def offload(self) -> float:
        """Free the GPU for sampling; seconds that it took, 0 where learner.offload does not apply."""
        ...

    def onload(self) -> float:
        """Undo `offload`; seconds that it took."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy weights and optimizer state to host memory now; what is returned writes them.

        It may run in a background thread, on every rank, one at a time.
        """
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks."""
        ...
