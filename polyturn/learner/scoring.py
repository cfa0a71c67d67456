"""Teacher-forced logprobs of a batch's trained tokens; shared by GRPO updates and supervised training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyturn.policy.forward import packed_states
from polyturn.policy.logprobs import EAGER, HowToScore, Scores, score
from polyturn.policy.model import Policy
from polyturn.policy.vision import Features
from polyturn.types import Batch


def trained(batch: Batch, values: Tensor) -> Tensor:
    """Pick the trained tokens of a [T] tensor, in reading order: [N]."""
    return values.index_select(0, batch.trained)


def score_batch(
    policy: Policy,
    batch: Batch,
    features: Mapping[str, Features],
    temperature: float,
    *,
    with_entropy_gradient: bool = False,
    how: HowToScore = EAGER,
) -> Scores:
    """Logprobs and entropies of the trained tokens [N]; logits exist only where a token is trained.

    The token at t is scored from the state at t - 1; nothing is scored at a sample's first position. Features of
    pictures that the batch does not show count with weight 0. A batch that trains nothing gives empty scores
    whose gradient is zero for every parameter, so that each rank's backward pass runs the same collectives.
    """
    batch = batch.to(policy.model.device)
    shown = {image.sha256 for image in batch.images}
    number = len(batch.before)
    hidden = packed_states(
        policy,
        batch,
        [features[batch.images[index].sha256] for index in batch.image_rows],
        spare=[feature for sha256, feature in features.items() if sha256 not in shown],
    )
    scores = score(
        policy,
        hidden.index_select(0, batch.before) if number else hidden[:1],
        trained(batch, batch.token_ids) if number else batch.token_ids[:1],
        temperature,
        with_entropy_gradient=with_entropy_gradient,
        how=how,
    )
    return Scores(scores.logprobs[:number], scores.entropy[:number])


def gradient_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clip gradients to `max_norm` and return their norm before clipping."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
