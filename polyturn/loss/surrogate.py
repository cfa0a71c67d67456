"""Clipped surrogates of the policy gradient (N tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyturn.params import LossParams

# exp of float32 overflows at 88, and the gradient of a branch that min() does not take is then 0 * inf = NaN.
# A ratio of exp(20) = 5e8 is clipped or meaningless long before.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios within +-MAX_LOG_RATIO, where exp is finite; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Surrogate:
    """Loss of each token and which bounds acted on it, all [N]."""

    loss: Tensor
    is_clipped: Tensor  # bool
    is_dual_clipped: Tensor  # bool


def clipped_surrogate(ratio: Tensor, advantages: Tensor, params: LossParams) -> Surrogate:
    """Separate bounds (PPO arXiv:1707.06347 eq. 7; clip-higher, DAPO arXiv:2503.14476 section 3.1), ratio [N].

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    and with dual_clip c, min(loss, -c * A) where A < 0 (arXiv:1912.09729). A token is clipped when the bound
    took its gradient away: above 1 + clip_high with A > 0, below 1 - clip_low with A < 0.

        >>> loss = LossParams(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> clipped_surrogate(ratio, advantages, loss).loss.tolist()
        [-1.2799999713897705, 1.5, -0.5, 3.0]
    """
    plain = ratio * advantages
    limited = ratio.clamp(1 - params.clip_low, 1 + params.clip_high) * advantages
    loss = -torch.minimum(plain, limited)
    is_dual_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    if params.dual_clip is not None:
        ceiling = -params.dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return Surrogate(loss, limited < plain, is_dual_clipped)


def cispo_surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, params: LossParams
) -> Surrogate:
    """The clipped ratio as a detached weight of the policy gradient (CISPO, arXiv:2506.13585), all [N].

        loss = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob

    No token loses its gradient. A token counts as clipped when its weight was; clip_low >= 1 is no lower bound.
    """
    weight = ratio.detach().clamp(1 - params.clip_low, 1 + params.clip_high)
    nothing = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-weight * advantages * logprobs, weight != ratio.detach(), nothing)
