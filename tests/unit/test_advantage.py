"""Group-relative advantages, by numbers; names of cases are those of the list of field failures."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.advantage import Outcome, advantages, advantages_of, are_equal, group_advantages
from polyturn.params import LossParams
from polyturn.types import Group, StopReason
from tests.unit.evaluation.test_evaluate import trajectory

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")
CENTRED = LossParams(normalize_std=False)


def outcomes(*groups: list[float | None]) -> list[Outcome]:
    """One sample a rollout."""
    return [
        Outcome(group, rollout, reward)
        for group, rewards in enumerate(groups)
        for rollout, reward in enumerate(rewards)
    ]


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def params_of(estimator: str, *, normalize_std: bool = True) -> LossParams:
    return LossParams.model_validate(
        {"advantage_estimator": estimator, "normalize_std": normalize_std}
    )


@pytest.mark.parametrize(("normalize_std", "scale"), [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize("sign", [1.0, -3.0])
def test_grpo_22_one_right_of_four_with_and_without_the_deviation(
    normalize_std: bool, scale: float, sign: float
) -> None:
    """GRPO-22: The sample deviation of 1, 0, 0, 0 is 0.5 (tinker-cookbook #579); negated and scaled rewards likewise."""
    found = group_advantages([sign, 0.0, 0.0, 0.0], normalize_std=normalize_std)
    factor = math.copysign(1, sign) * scale if normalize_std else sign
    assert found == pytest.approx([0.75 * factor] + [-0.25 * factor] * 3)


def test_grpo_01_uneven_groups_are_centred_on_their_own_means() -> None:
    """GRPO-01: Groups of four, two and three; a mean over all would give the second +0.444 (slime #1414)."""
    batch = outcomes([0.0, 1.0, 1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0])
    found = advantages(batch, CENTRED)
    assert found == pytest.approx([-0.5, 0.5, 0.5, -0.5, 0.0, 0.0, -1 / 3, -1 / 3, 2 / 3])
    assert found[4:6] == [0.0, 0.0]


def test_grpo_01_groups_may_come_in_any_order_and_mixed() -> None:
    batch = outcomes([0.0, 1.0, 1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0])
    for estimator in ESTIMATORS:
        expected = dict(zip(batch, advantages(batch, params_of(estimator)), strict=True))
        mixed = random.Random(0).sample(batch, len(batch))
        assert advantages(mixed, params_of(estimator)) == [expected[item] for item in mixed]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_grpo_04_a_rollout_of_several_samples_counts_once(estimator: str) -> None:
    """GRPO-04: Three segments of reward 1 and one of 0: the baseline is 0.5, not 0.75 (miles #2378)."""
    split = [Outcome(5, 0, 1.0)] * 3 + [Outcome(5, 1, 0.0)]
    if estimator == "grpo":
        assert advantages(split, CENTRED) == [0.5, 0.5, 0.5, -0.5]
    params = params_of(estimator)
    whole = advantages([Outcome(5, 0, 1.0), Outcome(5, 1, 0.0)], params)
    assert advantages(split, params) == [whole[0]] * 3 + [whole[1]]


def test_grpo_04_trajectories_of_one_sibling_are_one_rollout() -> None:
    first, second = trajectory(1.0), replace(trajectory(0.0), sibling=1)
    groups = [Group(0, (first, first, first, second)), Group(3, (trajectory(0.25),))]
    assert advantages_of(groups, CENTRED) == [[0.5, 0.5, 0.5, -0.5], [0.0]]


def test_samples_of_a_rollout_with_different_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group 5, rollout 0: .* rewards 1.0 and 0.0"):
        advantages([Outcome(5, 0, 1.0), Outcome(5, 0, 0.0)], CENTRED)
    with pytest.raises(ValueError, match=r"rewards .* and None"):
        advantages([Outcome(5, 0, 1.0), Outcome(5, 0, None)], CENTRED)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="reward of group 0, rollout 1 is"):
        advantages(outcomes([0.0, reward]), CENTRED)


@pytest.mark.parametrize(
    ("number", "reward"), [(7, 0.35), (6, 0.9), (8, 0.9), (16, 0.1), (2, 1 / 3), (64, 0.7)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_grpo_05_equal_rewards_give_exactly_zero(
    number: int, reward: float, dtype: type, estimator: str
) -> None:
    """GRPO-05: float32 residue over a deviation that is residue too would be 0.7 (NeMo-RL #4161); also beside other groups."""
    equal: list[float | None] = [float(dtype(reward))] * number
    found = advantages(outcomes(equal, [1.0, 0.0], equal), params_of(estimator))
    assert found[:number] == [0.0] * number
    assert found[number + 2 :] == [0.0] * number
    assert found[number] == -(found[number + 1] or 0.0) > 0


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e9, -1.0])
def test_grpo_05_rewards_that_differ_by_rounding_are_equal(scale: float) -> None:
    """0.1 + 0.2 against 0.3, and sums of three terms in float32: divided by their deviation they would be +-1."""
    assert group_advantages([scale * (0.1 + 0.2), scale * 0.3], normalize_std=True) == [0.0, 0.0]
    terms = [np.float32(0.1), np.float32(0.2), np.float32(0.4)]
    sums = [float(a + b + c) * scale for a, b, c in itertools.permutations(terms)]
    assert len(set(sums)) > 1
    assert group_advantages(sums, normalize_std=True) == [0.0] * 6
    assert not are_equal([scale, scale * (1 + 1e-5)])
    assert group_advantages([scale, scale * 1.001], normalize_std=True) != [0.0, 0.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_left_of_terms_that_cancel_is_no_reward(dtype: type, estimator: str) -> None:
    """Next to 0 the residue is all there is, and over its own deviation it would be 1.5 (NeMo-RL #4161, other input)."""
    left = float(dtype(0.3) + dtype(0.6) - dtype(0.9))
    assert left != 0
    found = advantages(outcomes([left, 0.0, 0.0, 0.0], [1.0, 0.0]), params_of(estimator))
    assert found[:4] == [0.0] * 4
    assert found[4] == -(found[5] or 0.0) > 0


@pytest.mark.parametrize("size", [1e-6, 1e200, 1e300])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_do_not_depend_on_the_size_of_rewards(size: float, estimator: str) -> None:
    """Squares of 1e200 are infinite, and every advantage would be 0 without a word."""
    params = params_of(estimator)
    found = known(advantages(outcomes([size, 0.0, 0.0, 0.0]), params))
    assert found == pytest.approx(known(advantages(outcomes([1.0, 0.0, 0.0, 0.0]), params)))


def test_grpo_05_one_outlier_stays_bounded() -> None:
    """Seven rewards 0.35 and one -0.25: leave-one-out with the others' deviation, 0, would explode (NeMo-RL #4161)."""
    rewards: list[float | None] = [0.35] * 7 + [-0.25]
    grpo = known(group_advantages(rewards, normalize_std=True))
    assert grpo[-1] == pytest.approx(-0.525 / math.sqrt(0.315 / 7))
    rloo = known(group_advantages(rewards, normalize_std=True, leave_one_out=True))
    assert rloo == pytest.approx([value * 8 / 7 for value in grpo])
    for values in (grpo, rloo):
        assert max(map(abs, values)) <= math.sqrt(8) * (1 + 1e-12)


def test_grpo_08_a_group_does_not_depend_on_other_groups() -> None:
    """GRPO-08: [1, 1, 1, 0] and [0, 0, 0, 1]: each sums to 0, with or without the other (grpo-flat #2)."""
    for params in (params_of("grpo"), CENTRED, params_of("rloo"), params_of("rloo")):
        both = known(advantages(outcomes([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]), params))
        assert sum(both[:4]) == pytest.approx(0.0, abs=1e-12)
        assert both[:4] == known(advantages(outcomes([1.0, 1.0, 1.0, 0.0]), params))
        assert both[4:] == pytest.approx([-value for value in both[:4]])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_siblings_without_reward_leave_the_baseline(estimator: str) -> None:
    """Failed and aborted ones get None; a group of which one is left teaches nothing."""
    params = params_of(estimator)
    found = advantages(outcomes([1.0, None, 0.0], [0.9, None, 0.9], [None, 1.0], [None]), params)
    assert [found[i] for i in (1, 4, 6, 8)] == [None] * 4
    assert [found[i] for i in (3, 5, 7)] == [0.0] * 3
    assert found[0] == -(found[2] or 0.0) > 0
    assert group_advantages([1.0, None, 0.0], normalize_std=False) == [0.5, None, -0.5]
    assert advantages([], params) == []


def test_failed_trajectories_carry_no_advantage() -> None:
    failed = trajectory(None, stop=StopReason.ENV_ERROR)
    siblings = [
        replace(t, sibling=i) for i, t in enumerate((trajectory(1.0), failed, trajectory(0.0)))
    ]
    assert advantages_of([Group(0, tuple(siblings))], CENTRED) == [[0.5, None, -0.5]]


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    """RLOO (arXiv:2402.14740): 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2."""
    params = params_of("rloo", normalize_std=False)
    assert advantages(outcomes([3.0, 1.0, 2.0]), params) == pytest.approx([1.5, -1.5, 0.0])


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9))
def test_leave_one_out_is_its_definition(rewards: list[float]) -> None:
    found = known(group_advantages(list(rewards), normalize_std=False, leave_one_out=True))
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_reinforce_plus_plus_baseline_divides_by_the_deviation_of_the_batch() -> None:
    """Centred by group: 2, -2 and 1, 0, -1; the deviation over all five is sqrt(10 / 4) (arXiv:2501.03262)."""
    found = advantages(
        outcomes([5.0, 1.0], [1.0, 0.0, -1.0]), params_of("reinforce_plus_plus_baseline")
    )
    scale = math.sqrt(10 / 4)
    assert found == pytest.approx([2 / scale, -2 / scale, 1 / scale, 0.0, -1 / scale])
    assert np.std(known(found), ddof=1) == pytest.approx(1.0)
    assert np.mean(known(found)) == pytest.approx(0.0, abs=1e-15)


def test_the_order_of_siblings_changes_no_bit() -> None:
    """Sums of 0.1, 0.2, 0.7 and 1e-3 differ in their last bits with the order of addition; advantages do not."""
    rewards = [0.1, 0.2, 0.7, 1e-3, 0.3]
    orders = list(itertools.permutations(range(5)))
    assert len({sum(rewards[i] for i in order) for order in orders}) > 1
    for normalize_std, leave_one_out in itertools.product((False, True), repeat=2):
        found = {
            tuple(
                value
                for _, value in sorted(
                    zip(
                        order,
                        group_advantages(
                            [rewards[i] for i in order],
                            normalize_std=normalize_std,
                            leave_one_out=leave_one_out,
                        ),
                        strict=True,
                    )
                )
            )
            for order in orders
        }
        assert len(found) == 1


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_advantages_sum_to_zero_keep_the_order_of_rewards_and_follow_their_sibling(
    rewards: list[float], normalize_std: bool, leave_one_out: bool, rng: random.Random
) -> None:
    def of(values: list[float]) -> list[float]:
        return known(
            group_advantages(list(values), normalize_std=normalize_std, leave_one_out=leave_one_out)
        )

    values = of(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-5)
    assert max(map(abs, values)) <= (math.sqrt(len(values)) * (1 + 1e-9) if normalize_std else 40)
    pairs = sorted(zip(rewards, values, strict=True))
    assert all(one[1] <= other[1] for one, other in itertools.pairwise(pairs))
    order = rng.sample(range(len(rewards)), len(rewards))
    assert of([rewards[i] for i in order]) == [values[i] for i in order]
