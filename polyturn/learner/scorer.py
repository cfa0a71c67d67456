"""A policy that scores packed batches, whole in one process or sharded over ranks; also as the reference of the KL."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyturn.learner import lora, sharding
from polyturn.learner.scoring import score_batch
from polyturn.policy import vision
from polyturn.policy.logprobs import HowToScore, Scores
from polyturn.policy.model import Policy
from polyturn.types import Batch


@dataclass(frozen=True)
class Scorer:
    """Scores with `policy`, whose modules lie under `root`; all ranks score a batch of their own at the same time."""

    policy: Policy
    root: sharding.Root
    tower: vision.TowerInTraining
    temperature: float
    how: HowToScore

    def score(
        self, batch: Batch, *, with_tower: bool, with_entropy_gradient: bool = False
    ) -> Scores:
        """Logprobs and entropies of the trained tokens, [N].

        `with_tower`: there are pictures, in this batch or in one of another rank, so that all run the vision tower.
        """

        def compute() -> tuple[Tensor, ...]:
            scores = score_batch(
                self.policy,
                batch,
                self.tower.features(batch.images) if with_tower else {},
                self.temperature,
                with_entropy_gradient=with_entropy_gradient,
                how=self.how,
            )
            # Copies: FSDP's hooks would be lost on views that somebody changes in place.
            return scores.logprobs.clone(), scores.entropy.clone()

        return Scores(*self.root(compute))

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, with_tower: bool) -> Tensor:
        """Logprobs of the trained tokens without gradient, [N]."""
        scores = self.score(batch, with_tower=with_tower)
        sharding.reshard(self.root)
        return scores.logprobs


@dataclass(frozen=True)
class Reference:
    """The policy before any training: a frozen copy, or the policy itself with its adapters off."""

    scorer: Scorer
    is_without_adapters: bool

    def logprobs(self, batch: Batch, *, with_tower: bool) -> Tensor:
        """Its logprobs of the trained tokens, [N]."""
        if not self.is_without_adapters:
            return self.scorer.logprobs(batch, with_tower=with_tower)
        with lora.switched_off(self.scorer.policy.model):
            return self.scorer.logprobs(batch, with_tower=with_tower)


def frozen_copy(policy: Policy, *, shares_tower: bool) -> Policy:
    """A policy with the same weights, which are never trained; `shares_tower`: also not those of the tower."""
    model, visual = policy.model, policy.model.model.visual
    twin = copy.deepcopy(model, {id(visual): visual} if shares_tower else {})
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    return replace(policy, model=twin)
