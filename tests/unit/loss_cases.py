"""Batches for tests of the loss: padded for references, flat for polyturn, and every variant of the params."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from polyturn.loss import LossInputs, LossTerms, merged, policy_loss, token_weights
from polyturn.params import LossParams
from tests.reference_grpo import Padded


def padded(*, dtype: torch.dtype = torch.float64, spread: float = 0.8, seed: int = 0) -> Padded:
    """Six sequences of up to 12 tokens: an observation between two replies, one without any trained token, one of one."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(6, 12, generator=generator, dtype=torch.float64)

    mask = torch.arange(12) < torch.tensor([9, 3, 12, 0, 6, 1])[:, None]
    mask[2, 4:8] = False
    sampler = -3 * torch.rand(6, 12, generator=generator, dtype=torch.float64)
    old = sampler + 0.25 * spread * noise()
    batch = Padded(
        logprobs=old + spread * noise(),
        old=old,
        sampler=sampler,
        reference=old + spread * noise(),
        entropy=noise().abs(),
        mask=mask.double(),
        advantages=torch.tensor([1.5, -0.5, -2.0, 1.0, 0.3, -1.2], dtype=torch.float64),
    )
    return Padded(**{field.name: getattr(batch, field.name).to(dtype) for field in fields(batch)})


def with_gradients(batch: Padded) -> Padded:
    """The same numbers; logprobs and entropy are leaves that require gradients."""
    return replace(
        batch,
        logprobs=batch.logprobs.detach().clone().requires_grad_(),
        entropy=batch.entropy.detach().clone().requires_grad_(),
    )


def inputs_of(batch: Padded, params: LossParams, rows: Sequence[int] | None = None) -> LossInputs:
    """The trained tokens of some rows, in this order, weighted as those of an update over all rows."""
    device = batch.mask.device
    order = torch.tensor(range(len(batch.mask)) if rows is None else rows, device=device)
    keep = batch.mask[order].bool()
    weights = token_weights(batch.mask.sum(1), params).to(batch.mask.dtype)[order]
    width = (len(order), batch.mask.shape[1])
    return LossInputs(
        logprobs=batch.logprobs[order][keep],
        old_logprobs=batch.old[order][keep],
        sampler_logprobs=batch.sampler[order][keep],
        reference_logprobs=batch.reference[order][keep] if params.needs_reference else None,
        entropy=batch.entropy[order][keep],
        advantages=batch.advantages[order][:, None].expand(width)[keep],
        weights=weights[:, None].expand(width)[keep],
        sequence=torch.arange(len(order), device=device)[:, None].expand(width)[keep],
    )


def in_micro_batches(
    batch: Padded, params: LossParams, parts: Sequence[Sequence[int]]
) -> LossTerms:
    """The terms of an update whose rows are split into micro-batches."""
    terms = [policy_loss(inputs_of(batch, params, rows), params) for rows in parts]
    loss = torch.stack([term.loss for term in terms]).sum()
    return LossTerms(loss, merged(term.sums for term in terms))


def variants() -> Iterator[LossParams]:
    """Every combination of surrogate, level of the ratio, correction and aggregation, with KL and entropy in turn."""
    surrogates = (
        {"surrogate": "clip"},
        {"surrogate": "clip", "dual_clip": 1.4},
        {"surrogate": "cispo"},
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    )
    aggregations = (
        {"aggregation": "token_mean"},
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant", "constant_divisor": 20},
    )
    modes = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    extras = itertools.cycle(
        (
            {},
            {"kl_coef": 0.1, "kl_estimator": "k1"},
            {"kl_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.05},
            {"kl_coef": 0.3, "kl_estimator": "k3"},
            {"entropy_coef": 0.01},
        )
    )
    for surrogate, level, mode, aggregation in itertools.product(
        surrogates, ("token", "sequence"), modes, aggregations
    ):
        yield LossParams.model_validate(
            {
                **surrogate,
                **aggregation,
                "ratio_level": level,
                "tis_mode": mode,
                "tis_clip": 1.3,
                "tis_clip_low": 0.6,
                **next(extras),
            }
        )


def name_of(params: LossParams) -> str:
    """What differs from the defaults."""
    chosen = params.model_dump(exclude_defaults=True)
    return ",".join(str(value) for value in chosen.values()) or "default"
