"""Every variant of the loss against the float64 reference, and against TRL where TRL has it: loss and gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyturn.loss import policy_loss
from polyturn.params import LossParams
from tests.reference_grpo import Padded, reference_loss
from tests.unit.loss_cases import (
    in_micro_batches,
    inputs_of,
    name_of,
    padded,
    variants,
    with_gradients,
)

VARIANTS = list(variants())
MICRO_BATCHES = ([[0, 1, 2, 3, 4, 5]], [[5, 0], [3], [4, 2, 1]], [[0], [1], [2], [3], [4], [5]])


def gradients(loss: Tensor, batch: Padded) -> list[Tensor]:
    found = torch.autograd.grad(loss, [batch.logprobs, batch.entropy], allow_unused=True)
    return [torch.zeros_like(batch.logprobs) if grad is None else grad for grad in found]


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("params", VARIANTS, ids=name_of)
def test_loss_and_gradients_are_those_of_the_reference(params: LossParams) -> None:
    """In any order and any micro-batches (open-instruct #1161, GRPO-15); a row without trained tokens counts nowhere."""
    batch = with_gradients(padded())
    expected = reference_loss(batch, params)
    expected_gradients = gradients(expected, batch)
    assert float(expected_gradients[0].norm()) > 0
    for parts in MICRO_BATCHES:
        loss = in_micro_batches(batch, params, parts).loss
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        for found, wanted in zip(gradients(loss, batch), expected_gradients, strict=True):
            assert relative(found, wanted) < 1e-12


def test_the_variants_differ() -> None:
    """So that the comparison above can fail: no two of them have the same gradient, but for the bounds not reached."""
    batch = with_gradients(padded())
    found = {
        tuple(
            round(float(x), 9)
            for grad in gradients(reference_loss(batch, params), batch)
            for x in grad.flatten()
        )
        for params in VARIANTS
    }
    assert len(found) == len(VARIANTS)


@pytest.mark.parametrize("params", VARIANTS[::7], ids=name_of)
def test_float32_is_the_reference_within_rounding(params: LossParams) -> None:
    exact, batch = with_gradients(padded()), with_gradients(padded(dtype=torch.float32))
    expected = gradients(reference_loss(exact, params), exact)
    loss = policy_loss(inputs_of(batch, params), params).loss
    for found, wanted in zip(gradients(loss, batch), expected, strict=True):
        assert relative(found.double(), wanted) < 1e-5


# -- TRL -------------------------------------------------------------------------------------------------------

TRL_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (TRL's arguments, ours)
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 20},
        {"aggregation": "constant", "constant_divisor": 20},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"aggregation": "sequence_mean", "ratio_level": "sequence"},
    ),
    "delta": ({"loss_type": "dapo", "delta": 1.4}, {"dual_clip": 1.4}),
    "beta": ({"loss_type": "dapo", "beta": 0.3}, {"kl_coef": 0.3, "kl_estimator": "k3"}),
    "beta of grpo": (
        {"loss_type": "grpo", "beta": 0.3},
        {"aggregation": "sequence_mean", "kl_coef": 0.3},
    ),
    "entropy": ({"loss_type": "bnpo", "entropy_coef": 0.2}, {"entropy_coef": 0.2}),
    **{
        mode: (
            {"loss_type": "dapo", "mode": mode, "clip_min": 0.6, "clip_max": 1.3},
            {"tis_mode": mode, "tis_clip": 1.3, "tis_clip_low": 0.6},
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


def importance_ratio(batch: Padded, chosen: dict[str, Any]) -> Tensor:
    """TRL computes it while it scores completions, out of reach: `vllm_importance_sampling_mode` as documented."""
    difference = (batch.old - batch.sampler) * batch.mask
    if chosen["mode"].startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = chosen["clip_min"], chosen["clip_max"]
    if chosen["mode"].endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def trl_loss(batch: Padded, chosen: dict[str, Any]) -> Tensor:
    """`GRPOTrainer._compute_loss` itself, on a trainer that is nothing but its settings and a model that knows its scores."""
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    rows = batch.mask.shape[0]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, batch.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=chosen.get("importance_sampling_level", "token"),
        beta=chosen.get("beta", 0.0),
        loss_type=chosen["loss_type"],
        epsilon_low=0.2,
        epsilon_high=chosen.get("epsilon_high", 0.28),
        args=SimpleNamespace(
            delta=chosen.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        use_vllm="mode" in chosen,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=chosen.get("max_completion_length"),
        _entropy_bonus_enabled="entropy_coef" in chosen,
        use_adaptive_entropy=False,
        entropy_coef=chosen.get("entropy_coef", 0.0),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        _metrics={"train": defaultdict(list)},
    )
    empty = torch.zeros(rows, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(batch.mask, dtype=torch.int64),
        "completion_mask": torch.ones_like(batch.mask, dtype=torch.int64),
        "tool_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if "mode" in chosen:
        inputs["importance_sampling_ratio"] = importance_ratio(batch, chosen)
    return trainer_class._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("name", TRL_VARIANTS)
def test_loss_and_gradients_are_those_of_trl(name: str) -> None:
    """On the same logprobs. TRL counts a completion without trained tokens as a sequence; ours leaves it out."""
    theirs, ours = TRL_VARIANTS[name]
    whole = padded()
    batch = with_gradients(
        Padded(**{key: value[[0, 1, 2, 4, 5]] for key, value in vars(whole).items()})
    )
    expected = trl_loss(batch, theirs)
    params = LossParams.model_validate(ours)
    loss = policy_loss(inputs_of(batch, params), params).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for found, wanted in zip(gradients(loss, batch), gradients(expected, batch), strict=True):
        assert relative(found, wanted) < 1e-12
