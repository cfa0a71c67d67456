"""Teacher-forced logprobs of a batch's trained tokens; shared by GRPO updates and supervised training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyturn.forward import Scores, hidden_states, score
from polyturn.model import Policy
from polyturn.types import Batch
from polyturn.vision import Features


def trained(batch: Batch, values: Tensor) -> Tensor:
    """Pick the trained tokens of a [B, T] tensor, in reading order: [N]."""
    return values[:, 1:][batch.loss_mask[:, 1:]]


def score_batch(
    policy: Policy, batch: Batch, features: Mapping[str, Features], temperature: float
) -> Scores:
    """Logprobs and entropies of the trained tokens [N]; logits exist only where a token is trained.

    The token at t is scored from the state at t - 1; nothing is scored at the first position.
    """
    slots = [features[batch.images[index].sha256] for index in batch.image_rows]
    hidden = hidden_states(policy, batch.token_ids, batch.position_ids, slots)
    before = hidden[:, :-1][batch.loss_mask[:, 1:]]
    return score(policy, before, trained(batch, batch.token_ids), temperature)


def gradient_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clip gradients to `max_norm` and return their norm before clipping."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
