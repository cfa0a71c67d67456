"""Intervals, paired differences and pass@k: worked numbers, coverage by simulation, false positives."""

import doctest
import itertools
import math

import numpy as np
import pytest

import polyturn.evaluation.statistics
from polyturn.evaluation.statistics import bootstrap_interval, paired_difference, pass_at_k


def test_docstring_examples_hold():
    assert doctest.testmod(polyturn.evaluation.statistics).failed == 0


def test_interval_of_zero_one_values_is_the_beta_quantile():
    # 30 of 100 right: Beta(31, 71), whose 2.5% and 97.5% quantiles are 0.2189 and 0.3959.
    interval = bootstrap_interval([1.0] * 30 + [0.0] * 70, num_samples=20_000, seed=1)
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(0.2189, abs=0.003)
    assert interval.high == pytest.approx(0.3959, abs=0.003)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_of_equal_values_has_width_and_holds_the_mean(value: float):
    interval = bootstrap_interval([value] * 50, num_samples=1000, seed=0)
    assert interval.low <= value <= interval.high
    assert interval.high - interval.low > 0.01


def test_interval_does_not_depend_on_the_order_of_draw_blocks_but_on_the_seed():
    values = list(np.linspace(0, 1, 40))
    first = bootstrap_interval(values, num_samples=1000, seed=3)
    assert first == bootstrap_interval(values, num_samples=1000, seed=3)
    assert first != bootstrap_interval(values, num_samples=1000, seed=4)


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("accuracy", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_coverage_of_the_95_percent_interval_lies_between_93_and_97_percent(
    n: int, accuracy: float
):
    # Exact over the number right: sum of its binomial chances whose interval holds the truth.
    covered = 0.0
    for right in range(n + 1):
        log_chance = (
            math.lgamma(n + 1) - math.lgamma(right + 1) - math.lgamma(n - right + 1)
            + right * math.log(accuracy) + (n - right) * math.log(1 - accuracy)
        )  # fmt: skip
        if log_chance < math.log(1e-6):
            continue
        values = [1.0] * right + [0.0] * (n - right)
        interval = bootstrap_interval(values, num_samples=2000, seed=right)
        covered += math.exp(log_chance) * (interval.low <= accuracy <= interval.high)
    assert 0.93 <= covered <= 0.97


def test_correlated_samples_of_one_problem_do_not_narrow_the_interval():
    rng = np.random.default_rng(0)
    per_problem = (rng.random(64) < 0.5).astype(float)
    by_problem = bootstrap_interval(per_problem, num_samples=2000, seed=0)
    as_if_independent = bootstrap_interval(np.repeat(per_problem, 8), num_samples=2000, seed=0)
    assert (by_problem.high - by_problem.low) > 2 * (as_if_independent.high - as_if_independent.low)


def test_paired_difference_is_narrower_than_unpaired_for_policies_that_fail_together():
    first = [0.0] * 40 + [1.0] * 40
    second = [0.0] * 32 + [1.0] * 48
    gain = paired_difference(first, second, num_samples=2000, seed=0)
    assert gain.mean == pytest.approx(0.1)
    assert 0 < gain.low < gain.high < 0.25


def test_no_difference_is_called_an_improvement_in_at_most_5_percent():
    rng = np.random.default_rng(7)
    false_positives = 0
    for trial in range(400):
        accuracy = rng.uniform(0.1, 0.9)
        first, second = (rng.random((2, 64)) < accuracy).astype(float)
        false_positives += paired_difference(first, second, num_samples=500, seed=trial).low > 0
    assert false_positives / 400 <= 0.05


def test_paired_difference_refuses_other_problem_counts():
    with pytest.raises(ValueError, match="same problems in both, got 3 and 2"):
        paired_difference([0, 1, 0], [1, 1], num_samples=10, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "non-empty"), ([0.5, 1.5], "between 0"), ([float("nan")], "between 0")],
)
def test_bad_values_are_refused(values: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, num_samples=10, seed=0)


def test_bad_level_is_refused():
    with pytest.raises(ValueError, match="level between 0 and 1"):
        bootstrap_interval([1.0], num_samples=10, seed=0, level=1.0)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, c: int, k: int):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_more_draws_than_samples():
    with pytest.raises(ValueError, match="k 5, num_samples 4"):
        pass_at_k(4, 1, 5)


def promotions(
    n: int, accuracy: float, *, shared: float, gain: float = 0.0, seed: int = 0
) -> float:
    """How often the promotion rule (lower bound of the paired difference above `gain`) says yes, when the second policy
    is better by exactly `gain`; `shared` is the share of problems that both solve or fail together."""
    alone = (1 - shared) * accuracy * (1 - accuracy)
    chances = [alone + gain / 2, alone - gain / 2]
    drawn = np.random.default_rng(seed).multinomial(n, [*chances, 1 - sum(chances)], size=1500)
    counts, times = np.unique(drawn, axis=0, return_counts=True)
    said_yes = 0
    for (up, down, same), number in zip(counts, times, strict=True):
        first = np.repeat([0.0, 1.0, 0.0], [up, down, same])
        second = np.repeat([1.0, 0.0, 0.0], [up, down, same])
        low = paired_difference(first, second, num_samples=400, seed=int(up)).low
        said_yes += int(number) * (low > gain)
    return said_yes / 1500


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("accuracy", [0.05, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_the_promotion_rule_is_fooled_in_at_most_5_percent(n: int, accuracy: float, shared: float):
    assert promotions(n, accuracy, shared=shared) <= 0.05


def test_the_promotion_rule_with_a_minimal_gain_is_fooled_in_at_most_5_percent():
    assert promotions(256, 0.5, shared=0.5, gain=0.05) <= 0.05


def test_the_promotion_rule_sees_a_gain_that_is_there():
    # 15 points, 256 problems, half of them solved or failed together: a gain of about four standard errors.
    alone = 0.5 * 0.25
    drawn = np.random.default_rng(3).multinomial(
        256, [alone + 0.075, alone - 0.075, 0.75], size=100
    )
    seen = [
        paired_difference([0] * up + [1] * down + [0] * same, [1] * up + [0] * down + [0] * same, 400, 0).low > 0
        for up, down, same in drawn
    ]  # fmt: skip
    assert sum(seen) >= 95


@pytest.mark.parametrize("n", [64, 256])
def test_coverage_of_the_paired_difference_is_at_least_93_percent(n: int):
    truth, covered = 0.1, 0
    drawn = np.random.default_rng(5).multinomial(n, [0.2, 0.1, 0.7], size=600)
    for up, down, same in drawn:
        first, second = [0] * up + [1] * down + [0] * same, [1] * up + [0] * down + [0] * same
        found = paired_difference(first, second, 400, seed=0)
        covered += found.low <= truth <= found.high
    assert covered / 600 >= 0.93
