"""The policy loss against hand-made numbers and a float64 reference that loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from polyturn.loss import LossInputs, LossTerms, policy_loss, token_weights
from polyturn.params import LossParams


def loss_of(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    params: LossParams,
) -> LossTerms:
    """One sequence; the sampler's logprobs are the old ones."""
    sequence = torch.zeros(len(new), dtype=torch.int64)
    entropy = torch.ones_like(weights)
    return policy_loss(
        LossInputs(new, old, old, None, entropy, advantages, weights, sequence), params
    )


def reference_loss(
    logprobs: list[list[float]],
    old: list[list[float]],
    mask: list[list[int]],
    advantages: list[float],
    params: LossParams,
) -> float:
    """The loss of an update, token by token in float64: the paper's objective, negated."""
    lengths = [sum(row) for row in mask]
    rows = sum(length > 0 for length in lengths)
    total = 0.0
    for row, advantage in enumerate(advantages):
        for token, is_trained in enumerate(mask[row]):
            if not is_trained:
                continue
            ratio = math.exp(logprobs[row][token] - old[row][token])
            clipped = min(max(ratio, 1 - params.clip_low), 1 + params.clip_high)
            objective = min(ratio * advantage, clipped * advantage)
            if params.dual_clip is not None and advantage < 0:
                objective = max(objective, params.dual_clip * advantage)
            divisor = {
                "token_mean": sum(lengths),
                "sequence_mean": rows * lengths[row],
                "constant": rows * (params.constant_divisor or 0),
            }[params.aggregation]
            total -= objective / divisor
    return total


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize(
    "aggregation", [("token_mean", None), ("sequence_mean", None), ("constant", 20.0)]
)
def test_loss_equals_the_reference_on_a_padded_batch(
    aggregation: tuple[str, float | None], dual_clip: float | None
) -> None:
    params = LossParams.model_validate(
        {"aggregation": aggregation[0], "constant_divisor": aggregation[1], "dual_clip": dual_clip}
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 3, 12, 0, 6])
    mask = torch.arange(12) < lengths[:, None]
    mask[2, 4:8] = False  # an observation between two replies
    old = -3 * torch.rand(5, 12, generator=generator, dtype=torch.float64)
    new = old + torch.randn(5, 12, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, -2.0, 1.0, 0.3], dtype=torch.float64)
    weights = token_weights(mask.sum(1), params)
    terms = loss_of(
        new[mask],
        old[mask],
        advantages[:, None].expand(5, 12)[mask],
        weights[:, None].expand(5, 12)[mask],
        params,
    )
    expected = reference_loss(
        new.tolist(), old.tolist(), mask.int().tolist(), advantages.tolist(), params
    )
    assert terms.loss.item() == pytest.approx(expected, rel=1e-12)


def test_ratios_are_clipped_per_token_not_per_sequence() -> None:
    """Ratios 1.1, 0.8 and 1.4, of which the last becomes 1.2; their product is 1.232 (hands-on-modern-rl #75)."""
    old = torch.tensor([0.6, 0.5, 0.25]).log()
    new = torch.tensor([0.66, 0.40, 0.35]).log()
    params = LossParams(clip_low=0.2, clip_high=0.2)
    terms = loss_of(new, old, torch.ones(3), torch.ones(3), params)
    assert terms.loss.item() == pytest.approx(-(1.1 + 0.8 + 1.2))
    assert terms.sums.values()["pg_clipfrac"] == pytest.approx(1 / 3)
    assert terms.sums.values()["ratio_error_max"] == pytest.approx(0.4)
    assert terms.sums.values()["ppo_kl"] == pytest.approx(float((old - new).mean()))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # above 1 + clip_high: no further push up
        (0.5, 1.0, -0.5, -0.5),  # below on a good token: pulled back up
        (0.5, -1.0, 0.8, 0.0),  # below 1 - clip_low: no further push down
        (1.5, -1.0, 1.5, 1.5),  # above on a bad token: pushed back down
        (9.0, -1.0, 3.0, 0.0),  # far above on a bad token: bounded by dual_clip
    ],
)
def test_clip_bounds_and_gradients(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    params = LossParams(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    terms = loss_of(new, torch.zeros_like(one), advantage * one, one, params)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient)


def test_own_logprobs_give_ratio_one_and_the_policy_gradient() -> None:
    new = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    advantages, weights = torch.tensor([1.5, -0.5]), torch.tensor([0.5, 0.5])
    terms = loss_of(new, new.detach(), advantages, weights, LossParams())
    terms.loss.backward()
    assert terms.sums.values()["ratio_error_max"] == 0.0
    assert terms.sums.values()["pg_clipfrac"] == 0.0
    assert new.grad is not None
    assert new.grad.tolist() == [-0.75, 0.25]


def test_no_trained_token_is_a_loss_of_zero() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    terms = loss_of(nothing, nothing.detach(), nothing.detach(), nothing.detach(), LossParams())
    terms.loss.backward()
    assert set(terms.sums.values().values()) == {0.0}


def test_empty_replies_are_not_counted() -> None:
    """Lengths 0, 5, 7: the denominator is 12 (Relax #205)."""
    lengths = torch.tensor([0, 5, 7])
    assert token_weights(lengths, LossParams()).tolist() == [1 / 12] * 3
    by_sequence = token_weights(lengths, LossParams(aggregation="sequence_mean"))
    assert by_sequence[1:].tolist() == [1 / 10, 1 / 14]
    constant = LossParams(aggregation="constant", constant_divisor=20)
    assert token_weights(lengths, constant).tolist() == [1 / 40] * 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_nothing_but_empty_replies_gives_finite_weights(aggregation: str) -> None:
    params = LossParams.model_validate({"aggregation": aggregation})
    assert token_weights(torch.tensor([0, 0]), params).isfinite().all()
