"""Puts a policy in place for training: what is frozen, adapters, precision, recomputation, sharding, device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyturn.learner import lora, sharding
from polyturn.learner.scorer import Scorer
from polyturn.params import LearnerParams
from polyturn.policy import fused
from polyturn.policy.logprobs import HowToScore
from polyturn.policy.model import Policy
from polyturn.policy.vision import TowerInTraining


@dataclass(frozen=True)
class Placement:
    """Where and how the policies of a learner live."""

    params: LearnerParams
    temperature: float
    num_ranks: int
    device: torch.device

    @property
    def is_sharded(self) -> bool:
        """Whether weights are FSDP2's."""
        return sharding.is_needed(self.num_ranks, self.params)

    def trained(self, policy: Policy, *, seed: int) -> Scorer:
        """Prepare the policy that is trained, in place; `seed` is of the initial adapters.

        Raises:
            LoraError: the adapters do not fit the model.
        """
        is_collective = self.num_ranks > 1 and not self.params.is_tower_frozen
        tower = TowerInTraining(
            policy, cache_mb=self.params.vision_cache_mb, is_collective=is_collective
        )
        tower.freeze(self.params.is_tower_frozen)
        if self.params.lora is not None:
            lora.add_adapters(policy.model, self.params.lora, seed=seed)
        if self.params.compile:  # inside of what is checkpointed
            fused.compile_modules(sharding.decoder_layers(policy.model))
            fused.compile_vision_blocks(sharding.vision_blocks(policy.model))
        if self.params.activation_checkpointing:
            sharding.checkpoint_activations(
                policy.model, with_vision=not self.params.is_tower_frozen
            )
        return self._placed(policy, tower)

    def frozen(self, policy: Policy, tower: TowerInTraining | None) -> Scorer:
        """Prepare a policy that is only looked up; `tower` gives features of its pictures (None: its own does)."""
        if tower is None:
            tower = TowerInTraining(policy, cache_mb=self.params.vision_cache_mb)
            tower.freeze(True)
        return self._placed(policy, tower)

    def _placed(self, policy: Policy, tower: TowerInTraining) -> Scorer:
        sharding.use_precision(policy.model, self.params)
        root = sharding.Root(policy.model)
        if self.is_sharded:
            sharding.apply(root, sharding.mesh_of(self.device), self.params)
        else:
            root.to(self.device)
        how = HowToScore(self.params.logit_chunk_tokens, self.params.compile)
        return Scorer(policy, root, tower, self.temperature, how)
