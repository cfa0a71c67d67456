"""Group-relative advantages, by numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.advantage import group_advantages


def test_one_right_of_four_with_and_without_the_deviation() -> None:
    """The sample deviation of 1, 0, 0, 0 is 0.5 (tinker-cookbook #579)."""
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(rewards, normalize_std=True) == [1.5, -0.5, -0.5, -0.5]


def test_uneven_groups_are_centred_on_their_own_means() -> None:
    """Groups of four, two and three; a mean over all would give the second +0.444 (slime #1414)."""
    groups = [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0]]
    centred = [group_advantages(rewards, normalize_std=False) for rewards in groups]
    assert centred[0] == [-0.5, 0.5, 0.5, -0.5]
    assert centred[1] == [0.0, 0.0]
    assert centred[2] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


@pytest.mark.parametrize(("number", "reward"), [(7, 0.35), (6, 0.9), (2, 1 / 3), (64, 0.1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(number: int, reward: float, dtype: type) -> None:
    """float32 residue over a deviation that is residue too would be 0.7 (NeMo-RL #4161)."""
    rewards = [float(dtype(reward))] * number
    assert group_advantages(rewards, normalize_std=True) == [0.0] * number


def test_one_outlier_stays_bounded() -> None:
    """Seven rewards 0.35 and one -0.25 (NeMo-RL #4161)."""
    advantages = group_advantages([0.35] * 7 + [-0.25], normalize_std=True)
    assert max(abs(value) for value in advantages if value is not None) < math.sqrt(8)
    assert advantages[-1] == pytest.approx(-0.525 / math.sqrt(0.315 / 7))


def test_siblings_without_reward_leave_the_baseline() -> None:
    assert group_advantages([1.0, None, 0.0], normalize_std=False) == [0.5, None, -0.5]
    assert group_advantages([0.9, None, 0.9], normalize_std=True) == [0.0, None, 0.0]
    assert group_advantages([None, 1.0, None], normalize_std=True) == [None, 0.0, None]
    assert group_advantages([None, None], normalize_std=True) == [None, None]


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    rewards: list[float], normalize_std: bool
) -> None:
    """Whatever other groups there are: a group knows only its own (grpo-flat #2)."""
    advantages = group_advantages(rewards, normalize_std=normalize_std)
    values = [value for value in advantages if value is not None]
    assert sum(values) == pytest.approx(0.0, abs=1e-5)
    assert max(map(abs, values)) <= (math.sqrt(len(values)) if normalize_std else 20)
    pairs = sorted(zip(rewards, values, strict=True))
    assert all(one[1] <= other[1] for one, other in itertools.pairwise(pairs))
