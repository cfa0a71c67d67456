"""The learner: AdamW on the Hugging Face modules, in one process or sharded over ranks with FSDP2.

In one process and float32 nothing is sharded: the policy's own modules are trained in place. What an update does is in
`polyturn.learner.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from polyturn.learner import lora
from polyturn.learner.base import Logprobs, UpdateStats
from polyturn.learner.device_memory import ModuleMemory, Offload
from polyturn.learner.export import exported
from polyturn.learner.fsdp_optimizer import FsdpOptimizer, adamw
from polyturn.learner.passes import Passes
from polyturn.learner.placement import Placement
from polyturn.learner.scorer import Reference, frozen_copy
from polyturn.learner.shares import Splitter, mean_gap
from polyturn.learner.state import LearnerState
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.seeds import derive
from polyturn.types import TrainingSample
from polyturn.world import ONE, World


@dataclass
class FsdpLearner:
    """Trains a policy; see the module docstring. `seed` is of the initial adapters, `device` None that of the policy."""

    policy: Policy
    renderer: Renderer
    params: LearnerParams
    loss: LossParams
    temperature: float
    seed: int = 0
    world: World = ONE
    device: torch.device | None = None

    def __post_init__(self) -> None:
        model = self.policy.model
        self._device = self.device or model.device
        self._place = Placement(self.params, self.temperature, self.world.size, self._device)
        has_copy = self.loss.needs_reference and self.params.lora is None
        is_frozen = self.params.is_tower_frozen
        twin = frozen_copy(self.policy, shares_tower=is_frozen) if has_copy else None
        splitter = Splitter.of(
            self.policy, self.renderer, self.params, world=self.world, device=self._device
        )
        scorer = self._place.trained(self.policy, seed=derive(self.seed, "lora"))
        # At once: between a forward pass and its backward pass the root's parameters are others.
        self.parameters = dict(model.named_parameters())
        self._names = dict(model.named_parameters(remove_duplicate=False))
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self._optimizer = adamw(trained, self.params, self._device)
        self._reference: Reference | None = None
        if twin is not None:
            tower = scorer.tower if is_frozen else None
            self._reference = Reference(self._place.frozen(twin, tower), is_without_adapters=False)
        elif self.loss.needs_reference:
            self._reference = Reference(scorer, is_without_adapters=True)
        self._state = LearnerState(self._saved(), self._optimizer, self._writers())
        others = [] if self._reference is None else [self._reference.scorer.policy.model]
        self._memory = ModuleMemory([*self.parameters.values()], self._optimizer, others)
        self._offload = Offload(self._memory, self._device, is_wanted=self.params.offload)
        root = scorer.root if self._place.is_sharded else None
        self._passes = Passes(
            policy=scorer,
            reference=self._reference,
            optimizer=FsdpOptimizer(self._optimizer, root, self.params.grad_clip),
            splitter=splitter,
            params=self.params,
            loss=self.loss,
            world=self.world,
        )

    @property
    def shares_weights(self) -> bool:
        """Whether the policy's own modules are trained in place, so that a sampler may use them as they are."""
        return not self._place.is_sharded and self.params.lora is None

    # -- training ---------------------------------------------------------------------------------------------

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        lr_scale: float,
        is_on_policy: bool,
        old_logprobs: Sequence[Logprobs] | None = None,
    ) -> UpdateStats:
        """One optimizer update over `samples`; the result does not depend on micro-batches, nor on ranks but by rounding.

        Raises:
            NonFiniteError: loss, a metric of it or gradients are not finite, on every rank; weights are as before.
        """
        self._offload.require_weights()
        return self._passes.update(
            samples, lr_scale=lr_scale, is_on_policy=is_on_policy, old_logprobs=old_logprobs
        )

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """The present policy's logprobs of the trained tokens of each sample, [T] and 0 elsewhere (collective)."""
        self._offload.require_weights()
        return self._passes.logprobs(samples)

    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens (0 if there are none), without training."""
        return mean_gap(self.logprobs(samples), samples)

    # -- weights ----------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, whole, under their Hugging Face names, adapters merged in; every rank has to take them all.

        Where `shares_weights`, they are the live storage.
        """
        self._offload.require_weights()
        has_adapters = self.params.lora is not None
        return exported(self._names, lora.merge_factors(self.policy.model) if has_adapters else {})

    def offload(self) -> float:
        """Move optimizer state and weights from the GPU to host memory and drop gradients; seconds that it took."""
        return self._offload.out()

    def onload(self) -> float:
        """Undo `offload`; seconds that it took."""
        return self._offload.back()

    # -- state ------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state into `directory`, which exists (collective).

        Raises:
            OSError: a file cannot be written.
        """
        self._offload.require_weights()
        self._state.write(self._state.tensors(), directory)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy weights and optimizer state to host memory now; what is returned does what `save` does with them.

        It may run in a background thread, on every rank, one at a time.
        """
        self._offload.require_weights()
        tensors = self._state.on_host()
        return lambda directory: self._state.write(tensors, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, with any number of ranks (collective).

        Raises:
            StateError: it is the state of another model or of other learner params.
        """
        self._offload.require_weights()
        self._state.read(directory)

    def _saved(self) -> dict[str, torch.nn.Parameter]:
        """What a checkpoint holds by name: all weights, or with adapters these alone, as the others never change."""
        if self.params.lora is None:
            return self.parameters
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def _writers(self) -> dist.ProcessGroup | None:
        """A group for checkpoints alone, so that one can be written while training goes on."""
        if not self._place.is_sharded:
            return None
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group
