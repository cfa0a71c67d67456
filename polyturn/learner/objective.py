"""What a micro-batch adds to an update's loss; the same for every learner."""

from __future__ import annotations

from torch import Tensor

from polyturn.learner.scoring import trained
from polyturn.loss import LossInputs, LossTerms, policy_loss
from polyturn.params import LossParams
from polyturn.policy.logprobs import Scores
from polyturn.types import Batch


def loss_terms(
    loss: LossParams,
    batch: Batch,
    scores: Scores,
    *,
    reference: Tensor | None,
    old: Tensor | None,
    is_on_policy: bool,
) -> LossTerms:
    """Loss and metrics of a micro-batch's trained tokens, whose `scores`, `reference` and `old` logprobs are [N].

    With `is_on_policy` the old logprobs are the scores themselves, detached; without `old` they are the sampler's.
    """
    sampled = trained(batch, batch.logprobs)
    if is_on_policy:
        old = scores.logprobs.detach()
    inputs = LossInputs(
        logprobs=scores.logprobs,
        old_logprobs=sampled if old is None else old,
        sampler_logprobs=sampled,
        reference_logprobs=reference,
        entropy=scores.entropy,
        advantages=trained(batch, batch.advantages),
        weights=trained(batch, batch.weights),
        sequence=trained(batch, batch.sequence),
    )
    return policy_loss(inputs, loss)
