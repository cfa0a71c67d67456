"""What every learner does with samples, in micro-batches that are split over its ranks: an optimizer update, logprobs.

Every rank gets all samples and takes its share, so that denominators are those of the whole update and the split is the
same everywhere without talking. Gradients and metrics are sums over the ranks that split the samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyturn.learner.base import Logprobs, NonFiniteError, UpdateStats
from polyturn.learner.objective import loss_terms
from polyturn.learner.shares import Share, Splitter, has_pictures, is_scored, spread
from polyturn.loss import MetricSums, merged, token_weights
from polyturn.memory import lowered_by
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.logprobs import Scores
from polyturn.types import Batch, TrainingSample
from polyturn.world import World


class ScoredPolicy(Protocol):
    """A policy that is looked up; all ranks that share weights score at the same time."""

    def logprobs(self, batch: Batch, *, with_tower: bool) -> Tensor:
        """Logprobs of the trained tokens without gradient, [N]."""
        ...


class TrainedPolicy(ScoredPolicy, Protocol):
    """A policy with gradients."""

    def score(
        self, batch: Batch, *, with_tower: bool, with_entropy_gradient: bool = False
    ) -> Scores:
        """Logprobs and entropies of the trained tokens, [N]."""
        ...


class Optimizer(Protocol):
    """The gradients of the trained policy and the step that they make; every rank calls every method."""

    def zero_gradients(self) -> None:
        """Drop all gradients."""
        ...

    def expect_more(self, has_more: bool) -> None:
        """Say whether further micro-batches of the same update follow the next backward pass."""
        ...

    def finish_gradients(self) -> float:
        """Sum gradients over ranks where the backward passes have not, and clip them to learner.grad_clip.

        Returns their norm before, over all weights of all ranks.
        """
        ...

    def step(self, learning_rate: float, *, with_tower: bool) -> None:
        """Step everything that has a gradient; without `with_tower` the vision tower has none."""
        ...


@dataclass(frozen=True)
class Passes:
    """Updates `policy` and scores with it; `reference` is that of the KL.

    `world` are all ranks. Those that `splitter` splits samples over are `data_group`'s, None: torch's default group.
    """

    policy: TrainedPolicy
    reference: ScoredPolicy | None
    optimizer: Optimizer
    splitter: Splitter
    params: LearnerParams
    loss: LossParams
    world: World
    data_group: dist.ProcessGroup | None = None

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        lr_scale: float,
        is_on_policy: bool,
        old_logprobs: Sequence[Logprobs] | None,
    ) -> UpdateStats:
        """What `Learner.update` says."""
        lengths = torch.tensor([int(is_scored(sample).sum()) for sample in samples])
        weights = token_weights(lengths, self.loss).tolist()
        self.optimizer.zero_gradients()
        parts: list[MetricSums] = []
        for share in self.splitter.shares(samples, weights):
            old = None
            if old_logprobs is not None:
                old = self.splitter.gathered(samples, old_logprobs, share.indices)
            parts.append(self._accumulate(share, old, is_on_policy=is_on_policy))
        metrics = self._summed(parts).values()
        norm = self.optimizer.finish_gradients()
        self._require_finite(metrics, norm)
        num_tokens, learning_rate = int(lengths.sum()), self.params.lr * lr_scale
        if num_tokens:
            self.optimizer.step(learning_rate, with_tower=has_pictures(samples))
        return UpdateStats(
            grad_norm=norm, lr=learning_rate, num_tokens=num_tokens, loss_metrics=metrics
        )

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """The present policy's logprobs of the trained tokens of each sample, [T] and 0 elsewhere (collective)."""
        mine: dict[int, Logprobs] = {}
        for share in self.splitter.shares(samples, [0.0] * len(samples)):
            scored = self.policy.logprobs(share.batch, with_tower=share.with_tower).cpu().numpy()
            mine |= spread(scored, samples, share.indices)
        found = {index: one for part in self.world.all_gather(mine) for index, one in part.items()}
        return [found[index] for index in range(len(samples))]

    def _accumulate(self, share: Share, old: Tensor | None, *, is_on_policy: bool) -> MetricSums:
        """Add a micro-batch's gradients; `old` [N] are logprobs to compare with, None: the sampler's."""
        self.optimizer.expect_more(share.has_more)
        with lowered_by("training", {"learner.micro_batch_tokens": self.params.micro_batch_tokens}):
            batch, reference = share.batch, None
            if self.reference is not None:
                reference = self.reference.logprobs(batch, with_tower=share.with_tower)
            scores = self.policy.score(
                batch,
                with_tower=share.with_tower,
                with_entropy_gradient=self.loss.needs_entropy_gradient,
            )
            terms = loss_terms(
                self.loss, batch, scores, reference=reference, old=old, is_on_policy=is_on_policy
            )
            terms.loss.backward()
            return terms.sums

    def _summed(self, parts: Sequence[MetricSums]) -> MetricSums:
        """Metrics over all samples: ranks that share weights have computed the same ones."""
        sums = merged(parts)
        return sums.all_reduced(self.data_group) if self.splitter.world.size > 1 else sums

    def _require_finite(self, metrics: Mapping[str, float], norm: float) -> None:
        """Drop the gradients and raise, on every rank, if a number is none; weights are as before."""
        wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if wrong or not math.isfinite(norm):
            self.optimizer.zero_gradients()
            told = f"; not finite: {', '.join(wrong)}" if wrong else ""
            raise NonFiniteError(f"loss {metrics['loss']}, gradient norm {norm}{told}")
