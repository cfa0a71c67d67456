"""The policy loss by hand-made numbers; the references of all variants are in test_loss_reference.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyturn.loss import LossInputs, LossTerms, MetricSums, merged, policy_loss, token_weights
from polyturn.loss.importance import importance_correction
from polyturn.loss.kl import KlEstimator, kl_penalty
from polyturn.loss.sums import max_of, mean_of
from polyturn.params import LossParams
from polyturn.world import World
from tests.unit import ranks
from tests.unit.loss_cases import (
    in_micro_batches,
    inputs_of,
    name_of,
    padded,
    variants,
    with_gradients,
)

VARIANTS = list(variants())


def loss_of(
    new: Tensor, old: Tensor, advantages: Tensor, params: LossParams, weights: Tensor | None = None
) -> LossTerms:
    """One sequence, tokens weighted 1; the sampler's logprobs are the old ones."""
    ones = torch.ones_like(old)
    sequence = torch.zeros(len(new), dtype=torch.int64)
    weights = ones if weights is None else weights
    return policy_loss(LossInputs(new, old, old, None, ones, advantages, weights, sequence), params)


def sequences(*rows: list[float]) -> tuple[Tensor, Tensor]:
    """Values of some sequences as [N], and the sequence of each."""
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return values, torch.tensor([index for index, row in enumerate(rows) for _ in row])


# -- ratios and bounds -----------------------------------------------------------------------------------------


def test_grpo_19_ratios_are_clipped_per_token_not_per_sequence() -> None:
    """GRPO-19: Ratios 1.1, 0.8 and 1.4, of which the last becomes 1.2; their product is 1.232 (hands-on-modern-rl #75)."""
    old = torch.tensor([0.6, 0.5, 0.25]).log()
    new = torch.tensor([0.66, 0.40, 0.35]).log()
    terms = loss_of(new, old, torch.ones(3), LossParams(clip_low=0.2, clip_high=0.2))
    assert terms.loss.item() == pytest.approx(-(1.1 + 0.8 + 1.2))
    metrics = terms.sums.values()
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["ratio_error_max"] == pytest.approx(0.4)
    assert metrics["ratio_error"] == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert metrics["ois"] == pytest.approx((1.1 + 0.8 + 1.4) / 3)
    assert metrics["ppo_kl"] == pytest.approx(float((old - new).mean()))
    assert metrics["loss"] == metrics["pg_loss"] == pytest.approx(terms.loss.item())


def test_grpo_19_at_sequence_level_it_is_the_geometric_mean() -> None:
    """GSPO: (1.1 x 0.8 x 1.4) ^ (1/3) for the first three tokens, 3 for the fourth, a sequence of its own."""
    new, sequence = sequences([math.log(r) for r in (1.1, 0.8, 1.4)], [math.log(3)])
    zeros, ones = torch.zeros_like(new), torch.ones_like(new)
    inputs = LossInputs(new, zeros, zeros, None, ones, ones, ones, sequence)
    terms = policy_loss(inputs, LossParams(ratio_level="sequence", clip_high=0.28))
    assert terms.loss.item() == pytest.approx(-(3 * 1.232 ** (1 / 3) + 1.28))
    assert terms.sums.values()["pg_clipfrac"] == 1 / 4


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.5, 1.0, -1.28, 0.0, 1),  # above 1 + clip_high: no further push up
        (0.5, 1.0, -0.5, -0.5, 0),  # below on a good token: pulled back up
        (0.5, -1.0, 0.8, 0.0, 1),  # below 1 - clip_low: no further push down
        (1.5, -1.0, 1.5, 1.5, 0),  # above on a bad token: pushed back down
        (9.0, -1.0, 3.0, 0.0, 0),  # far above on a bad token: bounded by dual_clip
        (9.0, 0.0, 0.0, 0.0, 0),  # neither good nor bad: no bound acts
    ],
)
def test_clip_bounds_and_gradients(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    params = LossParams(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    terms = loss_of(new, old, torch.tensor([advantage], dtype=torch.float64), params)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient)
    metrics = terms.sums.values()
    assert metrics["pg_clipfrac"] == clipped
    assert metrics["pg_clipfrac_lower"] == (loss == 3.0)


@pytest.mark.parametrize(
    ("ratio", "weight"), [(1.5, 1.28), (1.1, 1.1), (0.5, 0.8), (50.0, 1.28), (1e-3, 0.8)]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_never_takes_a_gradient_away(ratio: float, weight: float, advantage: float) -> None:
    """The gradient of a logprob is -weight x A, whatever the sign of A."""
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    terms = loss_of(new, old, torch.full_like(old, advantage), LossParams(surrogate="cispo"))
    terms.loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-weight * advantage)
    assert terms.sums.values()["pg_clipfrac"] == (weight != ratio)


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_11_own_logprobs_give_ratio_one_and_the_policy_gradient(
    surrogate: str, level: str
) -> None:
    """On policy every variant is -A x weight on every token's logprob."""
    params = LossParams.model_validate({"surrogate": surrogate, "ratio_level": level})
    batch = with_gradients(padded())
    batch = replace(batch, old=batch.logprobs.detach())
    inputs = inputs_of(batch, params)
    terms = policy_loss(inputs, params)
    (gradient,) = torch.autograd.grad(terms.loss, [batch.logprobs])
    expected = -batch.advantages[:, None] * batch.mask / batch.mask.sum()
    torch.testing.assert_close(gradient, expected)
    metrics = terms.sums.values()
    assert (metrics["ratio_error_max"], metrics["pg_clipfrac"], metrics["ppo_kl"]) == (0, 0, 0)
    assert metrics["ois"] == 1.0


@pytest.mark.parametrize("params", VARIANTS[::4], ids=name_of)
@pytest.mark.parametrize("gap", [90.0, -90.0, 2000.0, -2000.0])
def test_absurd_logprobs_give_finite_loss_and_gradients(params: LossParams, gap: float) -> None:
    """exp(90) overflows float32, and 0 x inf in the backward pass of the branch not taken would be NaN."""
    batch = padded(dtype=torch.float32)
    batch = with_gradients(replace(batch, logprobs=batch.logprobs + gap))
    terms = policy_loss(inputs_of(batch, params), params)
    found = torch.autograd.grad(terms.loss, [batch.logprobs, batch.entropy], allow_unused=True)
    assert terms.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in found if gradient is not None)
    assert all(math.isfinite(value) for value in terms.sums.values().values())


# -- nothing to train on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", VARIANTS[::4], ids=name_of)
def test_tok_15_nothing_but_masked_tokens_is_a_loss_of_zero(params: LossParams) -> None:
    """All four masked (NeMo-RL #158): loss and every metric 0, gradients finite, the same metrics as of others."""
    batch = padded()
    empty = with_gradients(replace(batch, mask=torch.zeros_like(batch.mask)))
    terms = policy_loss(inputs_of(empty, params), params)
    found = torch.autograd.grad(terms.loss, [empty.logprobs, empty.entropy], allow_unused=True)
    assert all((gradient == 0).all() for gradient in found if gradient is not None)
    assert set(terms.sums.values().values()) == {0.0}
    other = policy_loss(inputs_of(batch, params), params)
    assert terms.sums.values().keys() == other.sums.values().keys()
    assert terms.sums.merge(other.sums).values() == other.sums.values()


@pytest.mark.parametrize("params", VARIANTS[::4], ids=name_of)
def test_tok_15_one_fully_masked_sample_changes_nothing(params: LossParams) -> None:
    """Row 3 of six has no trained token; without it loss, denominators and metrics are the same."""
    batch = padded()
    kept = [0, 1, 2, 4, 5]
    without = type(batch)(**{name: value[kept] for name, value in vars(batch).items()})
    one, other = (policy_loss(inputs_of(b, params), params) for b in (batch, without))
    assert one.loss.item() == other.loss.item()
    assert one.sums.values() == other.sums.values()


# -- aggregation -----------------------------------------------------------------------------------------------


def test_grpo_18_empty_replies_are_not_counted() -> None:
    """GRPO-18: Lengths 0, 5, 7: the denominator is 12 (Relax #205)."""
    lengths = torch.tensor([0, 5, 7])
    assert token_weights(lengths, LossParams()).tolist() == [1 / 12] * 3
    by_sequence = token_weights(lengths, LossParams(aggregation="sequence_mean"))
    assert by_sequence[1:].tolist() == [1 / 10, 1 / 14]
    constant = LossParams(aggregation="constant", constant_divisor=20)
    assert token_weights(lengths, constant).tolist() == [1 / 40] * 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_grpo_18_nothing_but_empty_replies_gives_finite_weights(aggregation: str) -> None:
    params = LossParams.model_validate({"aggregation": aggregation})
    assert token_weights(torch.tensor([0, 0]), params).isfinite().all()
    assert token_weights(torch.tensor([], dtype=torch.int64), params).shape == (0,)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
def test_weights_of_all_tokens_sum_to_one(aggregation: str, lengths: list[int]) -> None:
    params = LossParams.model_validate({"aggregation": aggregation})
    counts = torch.tensor(lengths)
    assert float((token_weights(counts, params) * counts).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("params", VARIANTS[::4], ids=name_of)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_grpo_15_any_order_and_any_micro_batches_add_up(
    params: LossParams, data: st.DataObject
) -> None:
    """3 and 61 tokens in micro-batches of their own, or all in one (open-instruct #1161): loss and every metric."""
    batch = padded()
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [order[start:stop] for start, stop in itertools.pairwise([0, *cuts, 6])]
    whole = policy_loss(inputs_of(batch, params), params)
    split = in_micro_batches(batch, params, parts)
    assert split.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert split.sums.values() == pytest.approx(whole.sums.values(), rel=1e-12)


# -- KL and entropy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", math.log(2) - 0.5, 0.5)],
)  # fmt: skip
def test_kl_estimators_by_hand(estimator: KlEstimator, value: float, slope: float) -> None:
    """Probability .5 against .25: x = log 2; slopes 1, x and 1 - exp(-x)."""
    policy = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    found = kl_penalty(policy, torch.tensor([0.25], dtype=torch.float64).log(), estimator)
    found.backward()
    assert found.item() == pytest.approx(value)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("gap", [-200.0, -49.0, -21.0, -19.0, -1.0, 1.0, 19.0, 49.0, 200.0])
def test_k3_never_pushes_away_from_the_reference_however_far_the_policy_is(gap: float) -> None:
    """verl #751: exp(49) made NaN; a bound on it alone leaves the other term, whose slope is 1 in the wrong direction."""
    policy = torch.tensor([gap - 60.0], requires_grad=True)
    found = kl_penalty(policy, torch.tensor([-60.0]), "k3")
    found.backward()
    assert policy.grad is not None
    assert found.isfinite()
    assert policy.grad.isfinite()
    assert policy.grad.item() * gap >= 0
    assert (policy.grad.item() == 0) == (gap < -20)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    """Over the policy's own distribution both average to KL(policy, reference)."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    kl = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3"):
        estimates = kl_penalty(policy, reference, estimator)
        assert float((policy.exp() * estimates).sum()) == pytest.approx(kl)
    assert (kl_penalty(policy, reference, "k3") >= 0).all()
    assert (kl_penalty(policy, reference, "k1") < 0).any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_policy_that_is_the_reference_has_a_kl_of_exactly_zero(estimator: KlEstimator) -> None:
    params = LossParams(kl_coef=0.5, kl_estimator=estimator)
    batch = padded()
    terms = policy_loss(inputs_of(replace(batch, reference=batch.logprobs), params), params)
    metrics = terms.sums.values()
    assert metrics["kl_loss"] == metrics["ref_logprob_abs_diff_max"] == 0.0
    assert metrics["loss"] == metrics["pg_loss"]


def test_the_loss_is_the_sum_of_its_parts() -> None:
    params = LossParams(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.7)
    metrics = policy_loss(inputs_of(padded(), params), params).sums.values()
    whole = metrics["pg_loss"] + 0.3 * metrics["kl_loss"] - 0.7 * metrics["entropy_loss"]
    assert metrics["loss"] == pytest.approx(whole)
    assert metrics["entropy_loss"] == pytest.approx(metrics["entropy"])  # both token means here


def test_terms_that_are_switched_off_are_not_even_read() -> None:
    """No reference is loaded at coefficient 0, and an entropy without gradient is enough."""
    params = LossParams()
    assert not params.needs_reference
    assert not params.trains_without_advantage
    batch = with_gradients(padded())
    inputs = replace(inputs_of(batch, params), entropy=batch.entropy.detach()[batch.mask.bool()])
    assert {"kl_loss", "entropy_loss"}.isdisjoint(policy_loss(inputs, params).sums.values())
    assert LossParams(kl_coef=0.1).needs_reference
    assert LossParams(kl_coef=0.1).trains_without_advantage
    assert LossParams(entropy_coef=0.1).trains_without_advantage


def test_a_term_whose_input_is_missing_is_a_defect() -> None:
    batch = with_gradients(padded())
    without = replace(inputs_of(batch, LossParams()), reference_logprobs=None)
    with pytest.raises(AssertionError, match="no reference was scored"):
        policy_loss(without, LossParams(kl_coef=0.1))
    detached = replace(without, entropy=without.entropy.detach())
    with pytest.raises(AssertionError, match="entropy carries no gradient"):
        policy_loss(detached, LossParams(entropy_coef=0.1))


# -- the gap between sampler and learner -----------------------------------------------------------------------


def correction(mode: str, *rows: list[float]) -> tuple[list[float], dict[str, float]]:
    """Weights and metrics for ratios old / sampler of some sequences, bounds 0.5 and 2."""
    params = LossParams.model_validate({"tis_mode": mode, "tis_clip": 2.0, "tis_clip_low": 0.5})
    ratios, sequence = sequences(*rows)
    found = importance_correction(ratios.log(), torch.zeros_like(ratios), sequence, params)
    return found.weights.tolist(), found.sums.values()


ROWS = ([1.0, 1.5, 3.0], [0.25, 1.0])


def test_token_weights_are_truncated_or_masked_one_by_one() -> None:
    weights, metrics = correction("token_truncate", *ROWS)
    assert weights == pytest.approx([1.0, 1.5, 2.0, 0.5, 1.0])
    assert metrics["tis"] == pytest.approx((1 + 1.5 + 3 + 0.25 + 1) / 5)
    assert metrics["tis_weight"] == pytest.approx(6 / 5)
    assert metrics["tis_abs"] == pytest.approx((0 + 0.5 + 2 + 0.75 + 0) / 5)
    assert metrics["tis_clipfrac"] == pytest.approx(2 / 5)
    assert metrics["tis_max"] == pytest.approx(3)
    weights, metrics = correction("token_mask", *ROWS)
    assert weights == pytest.approx([1.0, 1.5, 0.0, 0.0, 1.0])
    assert metrics["tis_weight"] == pytest.approx(3.5 / 5)
    assert metrics["tis_maskfrac"] == pytest.approx(2 / 5)
    assert "tis_clipfrac" not in metrics


def test_sequence_weights_are_products_and_their_means_are_over_sequences() -> None:
    """1 x 1.5 x 3 = 4.5 and 0.25; a sequence without tokens, between them, is not counted."""
    weights, metrics = correction("sequence_truncate", ROWS[0], [], ROWS[1])
    assert weights == pytest.approx([2.0, 2.0, 2.0, 0.5, 0.5])
    assert metrics["tis"] == pytest.approx((4.5 + 0.25) / 2)
    assert metrics["tis_weight"] == pytest.approx(2.5 / 2)
    assert metrics["tis_clipfrac"] == 1.0
    weights, metrics = correction("sequence_mask", [0.5, 2.0, 1.25], [3.0])
    assert weights == pytest.approx([1.25, 1.25, 1.25, 0.0])
    assert metrics["tis_maskfrac"] == 0.5


def test_a_sampler_equal_to_the_learner_is_not_corrected() -> None:
    batch = padded()
    batch = replace(batch, sampler=batch.old)
    plain = policy_loss(inputs_of(batch, LossParams()), LossParams()).loss.item()
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        params = LossParams.model_validate({"tis_mode": mode})
        terms = policy_loss(inputs_of(batch, params), params)
        assert terms.loss.item() == plain
        metrics = terms.sums.values()
        assert (metrics["tis"], metrics["tis_weight"], metrics["tis_abs"]) == (1.0, 1.0, 0.0)


def test_weights_do_not_touch_kl_and_entropy() -> None:
    """Everything masked: the policy gradient is gone, the other terms are whole, as are all denominators."""
    params = LossParams(tis_mode="token_mask", kl_coef=0.5, entropy_coef=0.5)
    batch = padded()
    plain = policy_loss(inputs_of(batch, params), params).sums.values()
    far = replace(batch, sampler=batch.old - 5.0)
    masked = policy_loss(inputs_of(far, params), params).sums.values()
    assert masked["pg_loss"] == 0.0
    assert masked["tis_maskfrac"] == 1.0
    assert masked["kl_loss"] == plain["kl_loss"]
    assert masked["entropy_loss"] == plain["entropy_loss"]


def test_grpo_26_the_gap_to_the_sampler_is_always_measured() -> None:
    """0.2 nats on every token against 0.005 (slime #1411)."""
    batch = padded()
    for gap in (0.2, 0.005):
        shifted = replace(batch, sampler=batch.logprobs - gap)
        metrics = policy_loss(inputs_of(shifted, LossParams()), LossParams()).sums.values()
        assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(gap)
        assert metrics["train_rollout_logprob_abs_diff_max"] == pytest.approx(gap)


# -- sums ------------------------------------------------------------------------------------------------------


def sums_of(*numbers: float) -> MetricSums:
    values = torch.tensor(numbers)
    return MetricSums({"part": values.sum()}, {"mean": mean_of(values)}, {"max": max_of(values)})


def test_sums_of_unequal_parts_give_the_mean_of_all() -> None:
    """1, 2, 3 and 10: the mean is 4, not the mean 6 of means; nothing adds nothing."""
    whole = {"part": 16.0, "mean": 4.0, "max": 10.0}
    parts = [sums_of(1, 2, 3), sums_of(10), sums_of()]
    for order in itertools.permutations(parts):
        assert merged(order).values() == whole
    assert sums_of().values() == {"part": 0.0, "mean": 0.0, "max": 0.0}
    assert merged([]).values() == {}


def test_a_number_that_is_not_finite_is_not_lost_in_a_sum() -> None:
    total = merged([sums_of(1, 2), sums_of(math.nan), sums_of(3)]).values()
    assert all(math.isnan(value) for value in total.values())


def test_different_metrics_are_not_merged() -> None:
    with pytest.raises(ValueError, match=r"different metrics .*\['mean'\] and \[\]"):
        merged([MetricSums(means={"mean": mean_of(torch.ones(2))}), MetricSums()])


def reduce_on(world: World) -> dict[str, float]:
    """Rank 0 has the first rows of a batch, rank 1 no trained token, rank 2 the others."""
    params = LossParams(kl_coef=0.1, tis_mode="sequence_mask", dual_clip=3.0)
    batch = padded()
    rows = ([0, 1], [3], [2, 4, 5])[world.rank]
    return policy_loss(inputs_of(batch, params, rows), params).sums.all_reduced().values()


def test_metrics_of_ranks_add_up_also_when_one_has_no_token(tmp_path: Path) -> None:
    params = LossParams(kl_coef=0.1, tis_mode="sequence_mask", dual_clip=3.0)
    whole = policy_loss(inputs_of(padded(), params), params).sums.values()
    for rank in ranks.run("tests.unit.test_loss:reduce_on", tmp_path, size=3):
        assert rank.exit_code == 0, rank.output
        assert rank.outcome == pytest.approx(whole, rel=1e-12)
