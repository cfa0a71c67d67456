"""Checks of a training step; a run whose numbers cannot be trusted stops with what to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from polyturn.learner.base import UpdateStats
from polyturn.loss.checks import LossCheckError, check_finite, check_first_ratio, check_initial_kl
from polyturn.params import Params, TrainParams
from polyturn.training.metrics import Metrics

logger = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training stopped; the message says at which step and what to do."""


def check_gap(gap: float, params: TrainParams, step: int) -> Metrics:
    """Sampler against learner before a step's first update: an alarm above warn_logprob_gap.

    `gap` is the mean |sampler - learner| logprob of the sampled tokens, in nats. The same weights give about 1e-6
    in float32 and 0.01 in bfloat16; other positions, pictures or an old kernel give 0.1 and more, and the model
    then does not learn, without any other sign.

    Raises:
        TrainingError: it is above max_logprob_gap.
    """
    if not gap <= params.max_logprob_gap:
        raise TrainingError(
            f"step {step}: sampler and learner differ by {gap:.3f} nats a token, more than "
            f"train.max_logprob_gap {params.max_logprob_gap}; check that both see the same pictures and weights"
        )
    is_alarm = gap > params.warn_logprob_gap
    if is_alarm:
        logger.warning(
            "step %d: sampler and learner differ by %.3f nats a token, more than train.warn_logprob_gap %g",
            *(step, gap, params.warn_logprob_gap),
        )
    return {"train/logprob_gap_alarm": float(is_alarm)}


def check_updates(updates: Sequence[UpdateStats], params: Params, step: int) -> None:
    """A step's updates: finite metrics, ratios of 1 where it starts, a KL of 0 where the run starts.

    Ratios against the sampler's logprobs differ from 1 by the gap, which `check_gap` judges.

    Raises:
        TrainingError: one of these does not hold; the message has the numbers.
    """
    has_own_logprobs = (
        params.train.updates_per_rollout == 1 or params.learner.old_logprobs == "learner"
    )
    try:
        for update in updates:
            check_finite(update.loss_metrics)
        if updates and has_own_logprobs:
            check_first_ratio(updates[0].loss_metrics, params.loss.start_tolerance)
        if updates and step == 0 and params.loss.needs_reference:
            check_initial_kl(updates[0].loss_metrics, params.loss.start_tolerance)
    except LossCheckError as error:
        raise TrainingError(f"step {step}: {error}") from None
