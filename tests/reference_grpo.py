"""GRPO and its variants written a second time: float64, one padded batch, sequence by sequence, from the papers.

Shares no code with polyturn.loss. Everything is [B, T]; `advantages` [B]; `mask` holds 1 for trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyturn.params import LossParams


@dataclass(frozen=True)
class Padded:
    """One batch; `logprobs` and `entropy` may require gradients."""

    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor


def reference_loss(batch: Padded, p: LossParams) -> Tensor:
    """The objective of an update over the whole batch, negated."""
    rows = [row for row in range(len(batch.mask)) if batch.mask[row].any()]
    tokens = sum(int(batch.mask[row].sum()) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        keep = batch.mask[row].bool()
        length = int(keep.sum())
        per_token = _objective(batch, row, keep, p)
        if p.kl_coef:
            x = (batch.reference[row] - batch.logprobs[row])[keep]
            kl = {"k1": -x, "k2": 0.5 * x * x, "k3": x.exp() - x - 1}[p.kl_estimator]
            per_token = per_token - p.kl_coef * kl
        per_token = per_token + p.entropy_coef * batch.entropy[row][keep]
        if p.aggregation == "token_mean":
            total = total + per_token.sum() / tokens
        elif p.aggregation == "sequence_mean":
            total = total + per_token.sum() / length / len(rows)
        else:
            total = total + per_token.sum() / (p.constant_divisor or 0) / len(rows)
    return -total


def _objective(batch: Padded, row: int, keep: Tensor, p: LossParams) -> Tensor:
    new, old, a = batch.logprobs[row][keep], batch.old[row][keep], batch.advantages[row]
    ratio = (new - old).exp()
    if p.ratio_level == "sequence":
        ratio = (ratio.prod() ** (1 / len(new))).repeat(len(new))
    clipped = ratio.clamp(min=1 - p.clip_low).clamp(max=1 + p.clip_high)
    if p.surrogate == "cispo":
        objective = clipped.detach() * a * new
    else:
        objective = torch.stack([ratio * a, clipped * a]).min(0).values
        if p.dual_clip is not None and a < 0:
            objective = torch.stack([objective, (p.dual_clip * a).repeat(len(new))]).max(0).values
    w = (old.exp() / batch.sampler[row][keep].exp()).detach()
    if p.tis_mode.startswith("sequence"):
        w = w.prod().repeat(len(w))
    if p.tis_mode.endswith("truncate"):
        return objective * w.clamp(min=p.tis_clip_low).clamp(max=p.tis_clip)
    if p.tis_mode.endswith("mask"):
        return objective * w * ((w >= p.tis_clip_low) & (w <= p.tis_clip))
    return objective
