"""Checks of updates: each passes what is right, stops what is not, and says the numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from polyturn.learner.base import UpdateStats
from polyturn.loss import policy_loss
from polyturn.loss.checks import (
    LossCheckError,
    check_finite,
    check_first_ratio,
    check_initial_kl,
)
from polyturn.params import LossParams, Params, parse
from polyturn.training.checks import TrainingError, check_updates
from tests.unit.loss_cases import inputs_of, padded

KL = LossParams(kl_coef=0.1)


def metrics_at_the_start(*, ratio_of: float = 0.0, reference_of: float = 0.0) -> dict[str, float]:
    """Of a policy that is `ratio_of` nats from the old one and `reference_of` from the reference."""
    batch = padded()
    batch = replace(batch, old=batch.logprobs - ratio_of, reference=batch.logprobs - reference_of)
    return policy_loss(inputs_of(batch, KL), KL).sums.values()


def test_a_run_that_starts_right_passes_all_checks() -> None:
    metrics = metrics_at_the_start()
    check_finite(metrics)
    check_first_ratio(metrics, 1e-5)
    check_initial_kl(metrics, 1e-5)


@pytest.mark.parametrize("name", ["loss", "ratio_error_max", "entropy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_stops_and_is_named(name: str, value: float) -> None:
    with pytest.raises(LossCheckError, match=rf"^not finite: {name} {value:.3g}$"):
        check_finite({**metrics_at_the_start(), name: value})


def test_a_logprob_that_is_no_number_reaches_the_metrics() -> None:
    batch = padded()
    batch.logprobs[4, 2] = torch.nan
    with pytest.raises(LossCheckError, match=r"loss nan, .*ppo_kl nan"):
        check_finite(policy_loss(inputs_of(batch, KL), KL).sums.values())


def test_ratios_that_do_not_start_at_one_stop() -> None:
    metrics = metrics_at_the_start(ratio_of=0.1)
    check_first_ratio(metrics, 0.11)
    with pytest.raises(LossCheckError, match=r"mean error is 0\.105, more than .* 0\.05 \(ratio_"):
        check_first_ratio(metrics, 0.05)
    with pytest.raises(LossCheckError):
        check_first_ratio({**metrics, "ratio_error": math.nan}, 0.05)


def test_a_reference_that_is_not_the_initial_policy_stops() -> None:
    """Also one below the policy on some tokens and above on others, whose k1 cancels."""
    with pytest.raises(LossCheckError, match=r"differ by 0\.2 nats .* reference has other weights"):
        check_initial_kl(metrics_at_the_start(reference_of=0.2), 0.05)
    batch = padded()
    sign = torch.where(torch.arange(12) % 2 == 0, 0.2, -0.2)
    batch = replace(batch, reference=batch.logprobs + sign)
    with pytest.raises(LossCheckError):
        check_initial_kl(policy_loss(inputs_of(batch, KL), KL).sums.values(), 0.05)


def params_of(updates: int, old: str = "sampler", kl_coef: float = 0.1) -> Params:
    return parse(
        {
            "train": {"updates_per_rollout": updates},
            "learner": {"old_logprobs": old},
            "loss": {"kl_coef": kl_coef},
        }
    )


def stats(**distance: float) -> UpdateStats:
    return UpdateStats(1.0, 1e-3, 31, metrics_at_the_start(**distance))


def test_only_what_must_hold_is_asked_of_a_step() -> None:
    """Ratios of the first update with the learner's own old logprobs; KL of the run's first step; finite always."""
    right, far = stats(), stats(ratio_of=0.3, reference_of=0.3)
    check_updates([], params_of(1), 0)
    check_updates([right, far], params_of(2, "learner"), 0)
    check_updates([far], params_of(2, "sampler"), 7)
    check_updates([stats(reference_of=0.3)], params_of(1), 7)
    with pytest.raises(TrainingError, match="step 7: ratios before"):
        check_updates([far], params_of(1), 7)
    with pytest.raises(TrainingError, match="step 7: ratios before"):
        check_updates([far, right], params_of(2, "learner"), 7)
    with pytest.raises(TrainingError, match="step 0: policy and reference"):
        check_updates([stats(reference_of=0.3)], params_of(1), 0)
    broken = replace(right, loss_metrics={**right.loss_metrics, "entropy": math.nan})
    with pytest.raises(TrainingError, match="step 7: not finite: entropy nan"):
        check_updates([right, broken], params_of(2), 7)
