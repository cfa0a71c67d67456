"""The learner on Megatron-Core: weights shared by tensor-parallel ranks, samples split over data-parallel ones.

Ranks that share weights take the same share of the samples and compute the same loss. What an update does is in
`polyturn.learner.passes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from polyturn.learner.base import Logprobs, UpdateStats
from polyturn.learner.device_memory import Offload
from polyturn.learner.megatron import parallel
from polyturn.learner.megatron.checkpoint import MegatronState
from polyturn.learner.megatron.offload import DeviceMemory
from polyturn.learner.megatron.optimizer import LANGUAGE, TOWER, Stepper
from polyturn.learner.megatron.policy import MegatronPolicy, build
from polyturn.learner.megatron.versions import MegatronError
from polyturn.learner.megatron.weights import hf_tensors, load_hf
from polyturn.learner.passes import Passes
from polyturn.learner.scorer import frozen_copy
from polyturn.learner.shares import Splitter, mean_gap
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from polyturn.world import ONE, World

logger = logging.getLogger(__name__)


@dataclass
class MegatronLearner:
    """Trains a policy; see the module docstring. `device` None is that of the policy, whose tower is trained in place.

    Raises:
        MegatronError: megatron-core, the model and the params do not fit each other.
    """

    policy: Policy
    renderer: Renderer
    params: LearnerParams
    loss: LossParams
    temperature: float
    world: World = ONE
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self._check_params()
        self._device = self.device or self.policy.model.device
        layout = parallel.set_up(self.world, self.params, self._device)
        twin = None
        if self.loss.needs_reference:
            twin = frozen_copy(self.policy, shares_tower=self.params.freeze_vision)
        splitter = Splitter.of(
            self.policy, self.renderer, self.params, world=layout.data, device=self._device
        )
        exact = self.policy.model.state_dict()  # keeps what building rounds
        self.model = self._built(self.policy)
        self._reference = None if twin is None else self._built(twin, of=self.model)
        modules = {LANGUAGE: self.model.language, TOWER: self.model.visual}
        self.stepper = Stepper(modules, self.model.config, self.params, layout)
        if self.params.precision == "bfloat16":
            load_hf(self.model, exact, into=self.stepper.set_main)
        self._state = MegatronState(self.stepper, layout)
        self._memory = DeviceMemory(self.stepper, self._looked_up())
        self._offload = Offload(self._memory, self._device, is_wanted=self.params.offload)
        self._passes = Passes(
            policy=self.model,
            reference=self._reference,
            optimizer=self.stepper,
            splitter=splitter,
            params=self.params,
            loss=self.loss,
            world=self.world,
            data_group=layout.data_group,
        )

    def _check_params(self) -> None:
        if self.params.lora is not None:
            raise MegatronError(
                "learner.lora is built for learner.backend: fsdp alone; set it to null, or the backend to fsdp"
            )
        if not self.params.reshard_after_forward:
            logger.warning(
                "learner.reshard_after_forward does nothing with learner.backend: megatron"
            )

    def _built(self, policy: Policy, *, of: MegatronPolicy | None = None) -> MegatronPolicy:
        """The policy that is trained, or the frozen reference of one, with whose frozen tower it shares features."""
        return build(
            policy,
            self.params,
            self.temperature,
            device=self._device,
            is_trained=of is None,
            tower=of.tower if of is not None and self.params.freeze_vision else None,
        )

    def _looked_up(self) -> list[nn.Module]:
        """Modules on the device that no step changes."""
        found: list[nn.Module] = [] if TOWER in self.stepper.parts else [self.model.visual]
        if self._reference is not None:
            found += [self._reference.language, self._reference.visual]
        return found

    @property
    def shares_weights(self) -> bool:
        """Never: Megatron's weights are other tensors than the policy's."""
        return False

    # -- training ---------------------------------------------------------------------------------------------

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        lr_scale: float,
        is_on_policy: bool,
        old_logprobs: Sequence[Logprobs] | None = None,
    ) -> UpdateStats:
        """One optimizer update over `samples`; the result depends on micro-batches and ranks by rounding alone.

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
        """All parameters, whole, under their Hugging Face names; every rank has to take them all.

        One weight at a time is gathered; in bfloat16 they are the rounded ones that compute.
        """
        self._offload.require_weights()
        return hf_tensors(self.model)

    def offload(self) -> float:
        """Move weights and optimizer state from the GPU to host memory and drop gradients; seconds that it took."""
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
        self.snapshot()(directory)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy weights and optimizer state to host memory now; what is returned does what `save` does with them.

        It may run in a background thread, on every rank, one at a time.
        """
        self._offload.require_weights()
        state = self._state.on_host()
        return lambda directory: self._state.write(state, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, with any layout of ranks (collective).

        Raises:
            StateError: it is the state of another model or of other learner params.
        """
        self._offload.require_weights()
        self._state.read(directory)
