"""The learner: AdamW on the Hugging Face modules, in one process or sharded over ranks with FSDP2.

Every rank gets all samples of an update and takes its share, so that denominators are those of the whole update
and the split is the same everywhere without talking. In one process and float32 nothing is sharded: the policy's own
modules are trained in place.
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
from torch import Tensor

from polyturn import vision
from polyturn.learner import lora, sharding
from polyturn.learner.base import Logprobs, NonFiniteError, UpdateStats
from polyturn.learner.export import exported
from polyturn.learner.objective import loss_terms
from polyturn.learner.offload import HostCopy
from polyturn.learner.placement import Placement
from polyturn.learner.scorer import Reference, frozen_copy
from polyturn.learner.sharding import whole
from polyturn.learner.shares import Share, Splitter, is_scored, mean_gap, spread
from polyturn.learner.state import LearnerState
from polyturn.loss import MetricSums, merged, token_weights
from polyturn.memory import lowered_by
from polyturn.model import Policy
from polyturn.params import LearnerParams, LossParams
from polyturn.render import Renderer
from polyturn.seeds import derive
from polyturn.types import TrainingSample
from polyturn.world import ONE, World

logger = logging.getLogger(__name__)


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
        is_frozen = self._place.is_tower_frozen
        twin = frozen_copy(self.policy, shares_tower=is_frozen) if has_copy else None
        self._splitter = Splitter(
            self.renderer,
            self.world,
            self._device,
            self.params.micro_batch_tokens,
            0.0 if is_frozen else vision.patch_cost(self.policy),
        )
        self._scorer = self._place.trained(self.policy, seed=derive(self.seed, "lora"))
        # At once: between a forward pass and its backward pass the root's parameters are others.
        self.parameters = dict(model.named_parameters())
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._trained = [p for p in self.parameters.values() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=self.params.lr,
            betas=self.params.betas,
            eps=self.params.eps,
            weight_decay=self.params.weight_decay,
            fused=True if self._device.type == "cuda" else None,
        )
        self._reference: Reference | None = None
        if twin is not None:
            tower = self._scorer.tower if is_frozen else None
            self._reference = Reference(self._place.frozen(twin, tower), is_without_adapters=False)
        elif self.loss.needs_reference:
            self._reference = Reference(self._scorer, is_without_adapters=True)
        self._state = LearnerState(self._saved(), self._optimizer, self._writers())
        self._host = HostCopy()
        self._offloads = self.params.offload and self._device.type == "cuda"
        if self.params.offload and not self._offloads:
            logger.warning("learner.offload: true does nothing on %s, only on a GPU", self._device)

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

        With `is_on_policy` the old logprobs are the learner's own, detached (the ratio is 1 and its gradient that
        of the policy gradient); else they are `old_logprobs`, one array for each sample, or without these the
        sampler's.

        Raises:
            NonFiniteError: loss, a metric of it or gradients are not finite, on every rank; weights are as before.
        """
        self._require_weights()
        lengths = torch.tensor([int(is_scored(sample).sum()) for sample in samples])
        weights = token_weights(lengths, self.loss).tolist()
        learning_rate = self.params.lr * lr_scale
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad(set_to_none=True)
        parts: list[MetricSums] = []
        for share, has_more in _with_more(self._splitter.shares(samples, weights)):
            if self._place.is_sharded:
                sharding.expect_more(self._scorer.root, has_more)
            old = None
            if old_logprobs is not None:
                old = self._splitter.gathered(samples, old_logprobs, share.indices)
            with lowered_by(
                "training", {"learner.micro_batch_tokens": self.params.micro_batch_tokens}
            ):
                parts.append(self._accumulate(share, old, is_on_policy=is_on_policy))
        sums = merged(parts)
        metrics = (sums.all_reduced() if self.world.size > 1 else sums).values()
        num_tokens = int(lengths.sum())
        norm = self._clip_gradients()
        wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if wrong or not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            told = f"; not finite: {', '.join(wrong)}" if wrong else ""
            raise NonFiniteError(f"loss {metrics['loss']}, gradient norm {norm}{told}")
        if num_tokens:
            self._optimizer.step()
        return UpdateStats(
            grad_norm=norm, lr=learning_rate, num_tokens=num_tokens, loss_metrics=metrics
        )

    def _accumulate(self, share: Share, old: Tensor | None, *, is_on_policy: bool) -> MetricSums:
        """Add a micro-batch's gradients; `old` [N] are logprobs to compare with, None: the sampler's."""
        batch, reference = share.batch, None
        if self._reference is not None:
            reference = self._reference.logprobs(batch, with_tower=share.with_tower)
        scores = self._scorer.score(
            batch,
            with_tower=share.with_tower,
            with_entropy_gradient=self.loss.needs_entropy_gradient,
        )
        terms = loss_terms(
            self.loss, batch, scores, reference=reference, old=old, is_on_policy=is_on_policy
        )
        terms.loss.backward()
        return terms.sums

    def _clip_gradients(self) -> float:
        """Clip to learner.grad_clip; the norm before, over all ranks."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.params.grad_clip)
        return float(whole(norm))

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """The present policy's logprobs of the trained tokens of each sample, [T] and 0 elsewhere (collective)."""
        self._require_weights()
        mine: dict[int, Logprobs] = {}
        for share in self._splitter.shares(samples, [0.0] * len(samples)):
            scored = self._scorer.logprobs(share.batch, with_tower=share.with_tower).cpu().numpy()
            mine |= spread(scored, samples, share.indices)
        found = {index: one for part in self.world.all_gather(mine) for index, one in part.items()}
        return [found[index] for index in range(len(samples))]

    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens (0 if there are none), without training."""
        return mean_gap(self.logprobs(samples), samples)

    # -- weights ----------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, whole, under their Hugging Face names, adapters merged in; every rank has to take them all.

        Where `shares_weights`, they are the live storage.
        """
        self._require_weights()
        has_adapters = self.params.lora is not None
        return exported(self._names, lora.merge_factors(self.policy.model) if has_adapters else {})

    def offload(self) -> float:
        """Move optimizer state and weights from the GPU to host memory and drop gradients; seconds that it took."""
        if not self._offloads or self._host.is_away:
            return 0.0
        started = time.monotonic()
        self._optimizer.zero_grad(set_to_none=True)
        moments = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        others = [] if self._reference is None else self._reference.scorer.policy.model.parameters()
        self._host.take([*self.parameters.values(), *moments, *others])
        torch.cuda.empty_cache()
        return time.monotonic() - started

    def onload(self) -> float:
        """Undo `offload`; seconds that it took."""
        if not self._host.is_away:
            return 0.0
        started = time.monotonic()
        self._host.give_back()
        return time.monotonic() - started

    def _require_weights(self) -> None:
        assert not self._host.is_away, "the learner is offloaded: onload() first"

    # -- state ------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state into `directory`, which exists (collective).

        Raises:
            OSError: a file cannot be written.
        """
        self._require_weights()
        self._state.write(self._state.tensors(), directory)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy weights and optimizer state to host memory now; what is returned does what `save` does with them.

        It may run in a background thread, on every rank, one at a time.
        """
        self._require_weights()
        tensors = self._state.on_host()
        return lambda directory: self._state.write(tensors, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, with any number of ranks (collective).

        Raises:
            StateError: it is the state of another model or of other learner params.
        """
        self._require_weights()
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


def _with_more(shares: Iterator[Share]) -> Iterator[tuple[Share, bool]]:
    """Each share, and whether another one follows."""
    last = next(shares, None)
    while last is not None:
        following = next(shares, None)
        yield last, following is not None
        last = following
