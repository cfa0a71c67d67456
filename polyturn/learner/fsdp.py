"""The learner in plain PyTorch: one process, AdamW on the Hugging Face modules.

Sharding over several processes (fully_shard) is not in this version: learner.num_processes must be 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyturn import vision
from polyturn.batching import collate, micro_batches
from polyturn.learner.base import NonFiniteError, UpdateStats
from polyturn.learner.scoring import gradient_norm, score_batch, trained
from polyturn.loss import LossInputs, MetricSums, merged, policy_loss, token_weights
from polyturn.memory import lowered_by
from polyturn.model import Policy
from polyturn.params import LearnerParams, LossParams
from polyturn.render import Renderer
from polyturn.types import Batch, TrainingSample

STATE_FILE = "learner.pt"


@dataclass
class FsdpLearner:
    """Trains a policy in place; see the module docstring for its limits."""

    policy: Policy
    renderer: Renderer
    params: LearnerParams
    loss: LossParams
    temperature: float

    def __post_init__(self) -> None:
        if self.params.num_processes != 1:
            raise ValueError(
                f"learner.num_processes is {self.params.num_processes}; this version trains in one process, set it to 1"
            )
        self._tower = vision.TowerInTraining(self.policy)
        self._tower.freeze(self.params.freeze_vision)
        self._parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self.params.lr,
            betas=self.params.betas,
            weight_decay=self.params.weight_decay,
        )

    def update(
        self, samples: Sequence[TrainingSample], *, lr_scale: float, is_on_policy: bool
    ) -> UpdateStats:
        """One optimizer update over `samples` in micro-batches; the result does not depend on their size.

        With `is_on_policy` the old logprobs are the learner's own, detached (the ratio is 1 and its gradient that
        of the policy gradient); else they are the sampler's.

        Raises:
            NonFiniteError: loss or gradients are not finite; the weights are as before.
        """
        lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in samples])
        weights = token_weights(lengths, self.loss).tolist()
        learning_rate = self.params.lr * lr_scale
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad(set_to_none=True)
        parts: list[MetricSums] = []
        for indices in micro_batches(samples, self.params.micro_batch_tokens):
            batch = collate(
                [samples[i] for i in indices], [weights[i] for i in indices], self.renderer
            )
            with lowered_by(
                "training", {"learner.micro_batch_tokens": self.params.micro_batch_tokens}
            ):
                parts.append(self._accumulate(batch, is_on_policy=is_on_policy))
        metrics = merged(parts).values()
        num_tokens = int(lengths.sum())
        norm = gradient_norm(self._parameters, self.params.grad_clip)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"loss {metrics['loss']}, gradient norm {norm}")
        if num_tokens:
            self._optimizer.step()
        return UpdateStats(
            grad_norm=norm, lr=learning_rate, num_tokens=num_tokens, loss_metrics=metrics
        )

    @torch.no_grad()
    def logprob_gap(self, samples: Sequence[TrainingSample]) -> float:
        """Mean |learner - sampler| logprob over the trained tokens (0 if there are none), without training."""
        total, num_tokens = 0.0, 0
        for indices in micro_batches(samples, self.params.micro_batch_tokens):
            batch = collate([samples[i] for i in indices], [0.0] * len(indices), self.renderer)
            features = self._tower.features(batch.images)
            scores = score_batch(self.policy, batch, features, self.temperature)
            total += float((scores.logprobs - trained(batch, batch.logprobs)).abs().sum())
            num_tokens += len(scores.logprobs)
        return total / max(1, num_tokens)

    def _accumulate(self, batch: Batch, *, is_on_policy: bool) -> MetricSums:
        scores = score_batch(
            self.policy, batch, self._tower.features(batch.images), self.temperature
        )
        sampled = trained(batch, batch.logprobs)
        rows = torch.arange(len(batch.token_ids))[:, None].expand_as(batch.token_ids)
        inputs = LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=scores.logprobs.detach() if is_on_policy else sampled,
            sampler_logprobs=sampled,
            reference_logprobs=None,
            entropy=scores.entropy,
            advantages=trained(batch, batch.advantages),
            weights=trained(batch, batch.weights),
            sequence=trained(batch, rows),
        )
        terms = policy_loss(inputs, self.loss)
        terms.loss.backward()
        return terms.sums

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters under their Hugging Face names, the live storage."""
        for name, parameter in self.policy.model.named_parameters(remove_duplicate=False):
            yield name, parameter.data

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state to `directory`/learner.pt.

        Raises:
            OSError: the file cannot be written.
        """
        state = {"model": self.policy.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        with (directory / STATE_FILE).open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch hides what the file said, such as a full disk
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def load(self, directory: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(directory / STATE_FILE, weights_only=True)
        self.policy.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
