"""The learner on Megatron-Core: weights shared by tensor-parallel ranks, samples split over data-parallel ones.

Every rank gets all samples of an update. Ranks that share weights take the same share of them and compute the same
loss; denominators are those of the whole update, and gradients are sums over data-parallel ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyturn import vision
from polyturn.learner.base import Logprobs, NonFiniteError, UpdateStats
from polyturn.learner.megatron import parallel
from polyturn.learner.megatron.checkpoint import LANGUAGE, MegatronState
from polyturn.learner.megatron.offload import DeviceMemory
from polyturn.learner.megatron.optimizer import Stepper
from polyturn.learner.megatron.policy import MegatronPolicy, build
from polyturn.learner.megatron.versions import MegatronError
from polyturn.learner.megatron.weights import hf_tensors, load_hf
from polyturn.learner.objective import loss_terms
from polyturn.learner.scorer import frozen_copy
from polyturn.learner.shares import Share, Splitter, is_scored, mean_gap, spread
from polyturn.loss import MetricSums, merged, token_weights
from polyturn.memory import lowered_by
from polyturn.model import Policy
from polyturn.params import LearnerParams, LossParams
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from polyturn.world import ONE, World

logger = logging.getLogger(__name__)

TOWER = "visual"


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
        self._layout = parallel.set_up(self.world, self.params, self._device)
        is_frozen = self.params.freeze_vision
        twin = None
        if self.loss.needs_reference:
            twin = frozen_copy(self.policy, shares_tower=is_frozen)
        self._splitter = Splitter(
            self.renderer,
            self._layout.data,
            self._device,
            self.params.micro_batch_tokens,
            0.0 if is_frozen else vision.patch_cost(self.policy),
        )
        exact = self.policy.model.state_dict()  # keeps what building rounds
        self.model = self._built(self.policy)
        self._reference = None if twin is None else self._built(twin, of=self.model)
        modules = {LANGUAGE: self.model.language, TOWER: self.model.visual}
        self.stepper = Stepper(modules, self.model.config, self.params, self._layout)
        if self.params.precision == "bfloat16":
            load_hf(self.model, exact, into=self.stepper.set_main)
        self._state = MegatronState(self.stepper, self._layout)
        self._memory = DeviceMemory(self.stepper, self._looked_up())
        self._offloads = self.params.offload and self._device.type == "cuda"
        if self.params.offload and not self._offloads:
            logger.warning("learner.offload: true does nothing on %s, only on a GPU", self._device)

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

        With `is_on_policy` the old logprobs are the learner's own, detached; else they are `old_logprobs`, one array
        for each sample, or without these the sampler's.

        Raises:
            NonFiniteError: loss, a metric of it or gradients are not finite, on every rank; weights are as before.
        """
        self._require_weights()
        lengths = torch.tensor([int(is_scored(sample).sum()) for sample in samples])
        weights = token_weights(lengths, self.loss).tolist()
        self.stepper.zero_gradients()
        parts: list[MetricSums] = []
        for share in self._splitter.shares(samples, weights):
            old = None
            if old_logprobs is not None:
                old = self._splitter.gathered(samples, old_logprobs, share.indices)
            with lowered_by(
                "training", {"learner.micro_batch_tokens": self.params.micro_batch_tokens}
            ):
                parts.append(self._accumulate(share, old, is_on_policy=is_on_policy))
        metrics = self._summed(parts).values()
        self._sum_gradients()
        norm = self.stepper.clip_gradients()
        wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if wrong or not math.isfinite(norm):
            self.stepper.zero_gradients()
            told = f"; not finite: {', '.join(wrong)}" if wrong else ""
            raise NonFiniteError(f"loss {metrics['loss']}, gradient norm {norm}{told}")
        num_tokens, learning_rate = int(lengths.sum()), self.params.lr * lr_scale
        if num_tokens:
            self.stepper.step(learning_rate, self._touched_by(samples))
        return UpdateStats(
            grad_norm=norm, lr=learning_rate, num_tokens=num_tokens, loss_metrics=metrics
        )

    def _accumulate(self, share: Share, old: Tensor | None, *, is_on_policy: bool) -> MetricSums:
        """Add a micro-batch's gradients; `old` [N] are logprobs to compare with, None: the sampler's."""
        batch, reference = share.batch, None
        if self._reference is not None:
            reference = self._reference.logprobs(batch, with_tower=share.with_tower)
        scores = self.model.score(
            batch,
            with_tower=share.with_tower,
            with_entropy_gradient=self.loss.needs_entropy_gradient,
        )
        terms = loss_terms(
            self.loss, batch, scores, reference=reference, old=old, is_on_policy=is_on_policy
        )
        terms.loss.backward()
        return terms.sums

    def _sum_gradients(self) -> None:
        """Sum what the ranks have of each gradient; of the tower's each rank has that of its own pictures."""
        if TOWER in self.stepper.parts and self._layout.tensor.size > 1:
            for buffer in self.stepper.parts[TOWER].gradient_buffers():
                dist.all_reduce(buffer, group=self._layout.tensor_group)
        self.stepper.sum_gradients()

    def _summed(self, parts: Sequence[MetricSums]) -> MetricSums:
        """Metrics over all samples: ranks that share weights have computed the same ones."""
        sums = merged(parts)
        return sums.all_reduced(self._layout.data_group) if self._layout.data.size > 1 else sums

    def _touched_by(self, samples: Sequence[TrainingSample]) -> list[str]:
        """The parts that take a step: without any picture the tower has no gradient, rather than one of zeros."""
        has_pictures = any(sample.images for sample in samples)
        return [name for name in self.stepper.parts if has_pictures or name != TOWER]

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """The present policy's logprobs of the trained tokens of each sample, [T] and 0 elsewhere (collective)."""
        self._require_weights()
        mine: dict[int, Logprobs] = {}
        for share in self._splitter.shares(samples, [0.0] * len(samples)):
            scored = self.model.logprobs(share.batch, with_tower=share.with_tower).cpu().numpy()
            mine |= spread(scored, samples, share.indices)
        found = {index: one for part in self.world.all_gather(mine) for index, one in part.items()}
        return [found[index] for index in range(len(samples))]

    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens (0 if there are none), without training."""
        return mean_gap(self.logprobs(samples), samples)

    # -- weights ----------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, whole, under their Hugging Face names; every rank has to take them all.

        One weight at a time is gathered; in bfloat16 they are the rounded ones that compute.
        """
        self._require_weights()
        return hf_tensors(self.model)

    def offload(self) -> float:
        """Move weights and optimizer state from the GPU to host memory and drop gradients; seconds that it took."""
        if not self._offloads or self._memory.is_away:
            return 0.0
        started = time.monotonic()
        self._memory.free()
        torch.cuda.empty_cache()
        return time.monotonic() - started

    def onload(self) -> float:
        """Undo `offload`; seconds that it took."""
        if not self._memory.is_away:
            return 0.0
        started = time.monotonic()
        self._memory.take_back()
        return time.monotonic() - started

    def _require_weights(self) -> None:
        assert not self._memory.is_away, "the learner is offloaded: onload() first"

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
        self._require_weights()
        state = self._state.on_host()
        return lambda directory: self._state.write(state, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, with any layout of ranks (collective).

        Raises:
            StateError: it is the state of another model or of other learner params.
        """
        self._require_weights()
        self._state.read(directory)
