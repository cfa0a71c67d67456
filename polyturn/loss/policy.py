"""The policy loss of a micro-batch: surrogate, importance correction, KL and entropy over its trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyturn.loss.importance import importance_correction
from polyturn.loss.kl import kl_penalty
from polyturn.loss.sequences import sequence_means
from polyturn.loss.sums import MetricSums, max_of, mean_of
from polyturn.loss.surrogate import Surrogate, bounded, cispo_surrogate, clipped_surrogate
from polyturn.params import LossParams


@dataclass(frozen=True)
class LossInputs:
    """The N trained tokens of a micro-batch in reading order, all [N].

    A sequence is never split over micro-batches.
    """

    logprobs: Tensor  # of the policy that is trained, with gradient
    old_logprobs: Tensor  # of the policy before the rollout's first update, in the learner
    sampler_logprobs: Tensor  # of the policy that sampled, as the sampler says
    reference_logprobs: Tensor | None  # of the reference model; None without loss.kl_coef
    entropy: Tensor  # of the policy's distribution, with gradient if loss.entropy_coef is set
    advantages: Tensor
    weights: Tensor  # of each token in the loss, see `token_weights`
    sequence: Tensor  # int64, index of the token's sequence within the micro-batch


@dataclass(frozen=True)
class LossTerms:
    """`loss` carries the gradient and is divided by the update's denominator; both add over micro-batches and ranks."""

    loss: Tensor  # []
    sums: MetricSums


def policy_loss(inputs: LossInputs, params: LossParams) -> LossTerms:
    """Surrogate x importance weight + kl_coef x KL - entropy_coef x entropy, summed with `inputs.weights`.

    Old probabilities .6, .5, .25, new .66, .4, .35, clip 0.2/0.2 and A = 1 give ratios 1.1, .8, 1.4, of which the
    last is clipped to 1.2; the old logprobs are the sampler's:

        >>> import torch
        >>> old, new = torch.tensor([0.6, 0.5, 0.25]).log(), torch.tensor([0.66, 0.4, 0.35]).log()
        >>> one, sequence = torch.ones(3), torch.zeros(3, dtype=torch.int64)
        >>> terms = policy_loss(
        ...     LossInputs(new, old, old, None, one, one, one / 3, sequence), LossParams(clip_high=0.2)
        ... )
        >>> round(terms.loss.item(), 4), round(terms.sums.values()["pg_clipfrac"], 4)
        (-1.0333, 0.3333)

    At ratio_level sequence the three tokens share the geometric mean (1.1 * .8 * 1.4) ** (1/3):

        >>> terms = policy_loss(
        ...     LossInputs(new, old, old, None, one, one, one / 3, sequence), LossParams(ratio_level="sequence")
        ... )
        >>> round(terms.loss.item(), 4)
        -1.072
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if params.ratio_level == "sequence":
        ratio = bounded(sequence_means(log_ratio, inputs.sequence)).exp()
    else:
        ratio = bounded(log_ratio).exp()
    surrogate = _surrogate(inputs, ratio, params)
    correction = importance_correction(
        inputs.old_logprobs, inputs.sampler_logprobs, inputs.sequence, params
    )
    policy = (surrogate.loss * correction.weights * inputs.weights).sum()
    loss, parts = policy, {"pg_loss": policy}
    if params.needs_reference:
        kl = _kl(inputs, params)
        loss, parts = loss + params.kl_coef * kl, parts | {"kl_loss": kl}
    if params.needs_entropy_gradient:
        entropy = _entropy(inputs)
        loss, parts = loss - params.entropy_coef * entropy, parts | {"entropy_loss": entropy}
    parts = {"loss": loss, **parts}
    return LossTerms(
        loss,
        MetricSums(parts={name: value.detach().double() for name, value in parts.items()})
        .beside(_ratio_sums(inputs, ratio.detach(), surrogate, params))
        .beside(_distance_sums(inputs, params))
        .beside(correction.sums),
    )


def _surrogate(inputs: LossInputs, ratio: Tensor, params: LossParams) -> Surrogate:
    if params.surrogate == "cispo":
        return cispo_surrogate(inputs.logprobs, ratio, inputs.advantages, params)
    return clipped_surrogate(ratio, inputs.advantages, params)


def _kl(inputs: LossInputs, params: LossParams) -> Tensor:
    assert inputs.reference_logprobs is not None, "loss.kl_coef is set, but no reference was scored"
    estimates = kl_penalty(inputs.logprobs, inputs.reference_logprobs, params.kl_estimator)
    return (estimates * inputs.weights).sum()


def _entropy(inputs: LossInputs) -> Tensor:
    has_gradient = inputs.entropy.requires_grad or not inputs.logprobs.requires_grad
    assert has_gradient, "loss.entropy_coef is set, but the entropy carries no gradient"
    return (inputs.entropy * inputs.weights).sum()


def _ratio_sums(
    inputs: LossInputs, ratio: Tensor, surrogate: Surrogate, params: LossParams
) -> MetricSums:
    means = {
        "pg_clipfrac": mean_of(surrogate.is_clipped),
        "ppo_kl": mean_of(inputs.old_logprobs - inputs.logprobs),  # k1 of KL(old, new)
        "ois": mean_of(ratio),
        "ratio_error": mean_of((ratio - 1).abs()),
    }
    if params.dual_clip is not None:
        means["pg_clipfrac_lower"] = mean_of(surrogate.is_dual_clipped)
    return MetricSums(means=means, maxima={"ratio_error_max": max_of((ratio - 1).abs())})


def _distance_sums(inputs: LossInputs, params: LossParams) -> MetricSums:
    """Entropy, and how far the policy is from the sampler and from the reference."""
    gap = (inputs.logprobs.detach() - inputs.sampler_logprobs).abs()
    means = {"entropy": mean_of(inputs.entropy), "train_rollout_logprob_abs_diff": mean_of(gap)}
    maxima = {"train_rollout_logprob_abs_diff_max": max_of(gap)}
    if params.needs_reference and inputs.reference_logprobs is not None:
        apart = (inputs.logprobs.detach() - inputs.reference_logprobs).abs()
        means["ref_logprob_abs_diff"] = mean_of(apart)
        maxima["ref_logprob_abs_diff_max"] = max_of(apart)
    return MetricSums(means=means, maxima=maxima)
