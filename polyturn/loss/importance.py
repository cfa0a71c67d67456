"""Importance weights for the gap between the sampler's and the learner's distribution (N tokens, B sequences).

The sampler and the learner hold the same weights but differ in kernels and precision, so that a sample is off-policy
from the start. TIS truncates the weights (https://fengyao.notion.site/off-policy-rl), IcePop and MIS drop tokens or
sequences whose weight is out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyturn.loss.sequences import sequence_sums, token_counts
from polyturn.loss.sums import MetricSums, max_of, mean_of
from polyturn.loss.surrogate import bounded
from polyturn.params import LossParams


@dataclass(frozen=True)
class Correction:
    """Weight of each token's policy loss, [N], without gradient, and what was done to them."""

    weights: Tensor
    sums: MetricSums


@torch.no_grad()
def importance_correction(
    old_logprobs: Tensor, sampler_logprobs: Tensor, sequence: Tensor, params: LossParams
) -> Correction:
    """Weights exp(old - sampler), truncated to or masked outside of tis_clip_low ... tis_clip; arguments [N].

    At sequence level the weight is the product over a sequence's tokens, and means are over sequences. A masked token
    adds nothing to the policy loss but stays in its denominators.

        >>> old, sampler = torch.tensor([0.6, 0.1]).log(), torch.tensor([0.2, 0.1]).log()
        >>> def weights(mode):
        ...     params = LossParams(tis_mode=mode, tis_clip=2.0)
        ...     return importance_correction(old, sampler, torch.tensor([0, 1]), params).weights.tolist()
        >>> weights("token_truncate"), weights("token_mask"), weights("none")
        ([2.0, 1.0], [0.0, 1.0], [1.0, 1.0])
    """
    if params.tis_mode == "none":
        return Correction(torch.ones_like(old_logprobs), MetricSums())
    log_ratio = old_logprobs - sampler_logprobs
    is_of_sequence = params.tis_mode.startswith("sequence")
    if is_of_sequence:
        log_ratio = sequence_sums(log_ratio, sequence)
    ratio = bounded(log_ratio).exp()
    limited = ratio.clamp(params.tis_clip_low, params.tis_clip)
    is_outside = limited != ratio
    is_masked = params.tis_mode.endswith("mask")
    weights = ratio.masked_fill(is_outside, 0.0) if is_masked else limited
    has_tokens = token_counts(sequence) > 0 if is_of_sequence else slice(None)
    sums = MetricSums(
        means={
            "tis": mean_of(ratio[has_tokens]),
            "tis_abs": mean_of((ratio - 1).abs()[has_tokens]),
            "tis_weight": mean_of(weights[has_tokens]),
            ("tis_maskfrac" if is_masked else "tis_clipfrac"): mean_of(is_outside[has_tokens]),
        },
        maxima={"tis_max": max_of(ratio[has_tokens])},
    )
    return Correction(weights[sequence] if is_of_sequence else weights, sums)
