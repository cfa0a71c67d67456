"""Estimators of KL(policy, reference) at tokens that the policy sampled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polyturn.loss.surrogate import MAX_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """[N] logprobs of the policy and of the reference -> [N] estimates, http://joschu.net/blog/kl-approx.html.

    With x = logprob - reference: k1 = x, unbiased but often negative; k2 = x^2 / 2; k3 = exp(-x) - 1 + x, unbiased
    and never negative (GRPO, arXiv:2402.03300 eq. 4; called low_var_kl elsewhere). As a loss, k2 and k3 pull
    towards the reference; the gradient of k1 is 0 in expectation. Probabilities .5 and .25, x = log 2:

        >>> policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> [round(float(kl_penalty(policy, reference, name)), 4) for name in ("k1", "k2", "k3")]
        [0.6931, 0.2402, 0.1931]
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # Both terms together: past the bound the second alone would push away from the reference.
    difference = difference.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference
