"""Checks of an update's metrics: what must hold whatever the data is."""

from __future__ import annotations

import math
from collections.abc import Mapping


class LossCheckError(RuntimeError):
    """Numbers of an update that cannot be right; the message holds them."""


def check_finite(metrics: Mapping[str, float]) -> None:
    """Every metric of the loss is a finite number.

    Raises:
        LossCheckError: some are not; the message holds these.
    """
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if wrong:
        raise LossCheckError(f"not finite: {_listed(wrong)}")


def check_first_ratio(metrics: Mapping[str, float], tolerance: float) -> None:
    """Before a rollout's first update the policy is the one that sampled: its ratios are 1, their mean error small.

    Raises:
        LossCheckError: the mean |ratio - 1| is above `tolerance`.
    """
    if not metrics["ratio_error"] <= tolerance:
        raise LossCheckError(
            f"ratios before a rollout's first update must be 1, but their mean error is {metrics['ratio_error']:.3g}, "
            f"more than loss.start_tolerance {tolerance:g} ({_listed(metrics, 'ratio_error_max', 'ppo_kl')}); old "
            "logprobs are of other weights, another temperature or other tokens"
        )


def check_initial_kl(metrics: Mapping[str, float], tolerance: float) -> None:
    """Before a run's first update the policy is the reference: KL is 0.

    Raises:
        LossCheckError: the mean |policy - reference| logprob is above `tolerance` nats.
    """
    if not metrics["ref_logprob_abs_diff"] <= tolerance:
        raise LossCheckError(
            "policy and reference must be equal before the first update, but their logprobs differ by "
            f"{metrics['ref_logprob_abs_diff']:.3g} nats on average, more than loss.start_tolerance {tolerance:g} "
            f"({_listed(metrics, 'ref_logprob_abs_diff_max', 'kl_loss')}); the reference has other weights"
        )


def _listed(metrics: Mapping[str, float], *names: str) -> str:
    return ", ".join(f"{name} {metrics[name]:.3g}" for name in names or metrics)
