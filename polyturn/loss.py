"""The clipped policy loss; pure functions on the trained tokens of a micro-batch, N of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyturn.params import LossParams


@dataclass(frozen=True)
class LossTerms:
    """Sums over the trained tokens of a micro-batch, so that micro-batches add up; `loss` carries the gradient."""

    loss: Tensor  # [] already divided by the update's denominator
    clipped: Tensor  # [] number of tokens whose gradient the clip removed
    kl: Tensor  # [] sum of old - new logprob (the k1 estimate of KL(old, new))
    max_ratio_error: Tensor  # [] max |ratio - 1|


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, params: LossParams
) -> LossTerms:
    """Clipped surrogate with separate bounds (PPO arXiv:1707.06347 eq. 7; clip-higher, DAPO arXiv:2503.14476).

    All arguments are [N]: logprobs of the policy that is trained, of the policy that sampled, the advantage of
    each token's trajectory, and `token_weights`. Per token, with r = exp(logprob - old):

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    and with dual_clip c, min(loss, -c * A) where A < 0 (arXiv:1912.09729). Old probabilities .6, .5, .25, new
    .66, .4, .35, clip 0.2/0.2 and A = 1 give ratios 1.1, .8, 1.4, of which the last is clipped to 1.2:

        >>> old, new = torch.tensor([0.6, 0.5, 0.25]).log(), torch.tensor([0.66, 0.4, 0.35]).log()
        >>> terms = policy_loss(new, old, torch.ones(3), torch.ones(3) / 3, LossParams(clip_high=0.2))
        >>> round(terms.loss.item(), 4), terms.clipped.item()
        (-1.0333, 1.0)
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    bounded = ratio.clamp(1 - params.clip_low, 1 + params.clip_high) * advantages
    per_token = -torch.minimum(surrogate, bounded)
    if params.dual_clip is not None:
        floor = -params.dual_clip * advantages
        per_token = torch.where(advantages < 0, torch.minimum(per_token, floor), per_token)
    with torch.no_grad():
        clipped = (bounded < surrogate).sum().float()
        kl = -log_ratio.sum()
        max_error = (ratio - 1).abs().max() if len(ratio) else torch.zeros(())
    return LossTerms((per_token * weights).sum(), clipped, kl, max_error)


def token_weights(lengths: Tensor, params: LossParams) -> Tensor:
    """Weight of one token of each sequence, [B], from the numbers of trained tokens of all sequences, [B].

    token_mean: 1 / tokens of the update (DAPO). sequence_mean: 1 / (sequences x own length) (GRPO).
    constant: 1 / (sequences x constant_divisor) (Dr. GRPO, arXiv:2503.20783). A sequence without trained tokens
    adds nothing and is not counted.

        >>> token_weights(torch.tensor([0, 5, 7]), LossParams()).tolist() == [1 / 12] * 3
        True
    """
    lengths = lengths.double()
    num_sequences = (lengths > 0).sum().clamp(min=1).double()
    if params.aggregation == "token_mean":
        return (1 / lengths.sum().clamp(min=1)).expand(len(lengths))
    if params.aggregation == "sequence_mean":
        return 1 / (num_sequences * lengths.clamp(min=1))
    assert params.constant_divisor is not None
    return (1 / (num_sequences * params.constant_divisor)).expand(len(lengths))
