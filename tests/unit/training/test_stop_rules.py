"""When training ends early: each rule on histories whose numbers are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polyturn.params.train import StopParams
from polyturn.training.stop_rules import collapse, gap, gpu_hours, plateau, reason_to_stop


def scores(*lows: float | None) -> list[dict[str, float]]:
    """A history with validation scores; None is a step without one."""
    return [{} if low is None else {"eval/accuracy_low": low} for low in lows]


def rewards(*values: float) -> list[dict[str, float]]:
    return [{"rollout/raw_reward": value} for value in values]


def gaps(*values: float | None) -> list[dict[str, float]]:
    name = "train/train_rollout_logprob_abs_diff"
    return [{} if value is None else {name: value} for value in values]


@pytest.mark.parametrize(
    ("lows", "ends"),
    [
        ((0.3, 0.4, 0.4, 0.4), True),
        ((0.3, None, 0.4, None, 0.35, None, 0.39), True),
        ((0.4, 0.3, 0.2), True),
        ((0.3, 0.4, 0.35, 0.41), False),  # the last one is the best again
        ((0.3, 0.4, 0.4), False),  # one score since the best
        ((0.3,), False),
        ((), False),
    ],
)
def test_plateau_counts_scores_since_the_best(lows: Sequence[float | None], ends: bool) -> None:
    assert (plateau(scores(*lows), StopParams(plateau_evals=2)) is not None) is ends


def test_a_gain_too_small_to_count_does_not_lift_the_best() -> None:
    """0.30, 0.31, 0.32 with min_gain 0.03: both are within 0.03 of 0.30; 0.34 is not."""
    rule = StopParams(plateau_evals=2, plateau_min_gain=0.03)
    assert plateau(scores(0.30, 0.31, 0.32), rule)
    assert plateau(scores(0.30, 0.31, 0.34), rule) is None


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((0.4, 0.6, 0.2, 0.1), True),  # 0.15 against half of 0.5
        ((0.4, 0.6, 0.2, 0.3), False),  # exactly half is not below
        ((0.1, 0.5, 0.5, 0.1, 0.1), True),  # the best window is in the middle
        ((0.5, 0.1, 0.1), False),  # less than two windows
        ((-0.5, -0.4, -0.9, -0.9), False),  # no fraction of a mean that is not above 0
        ((0.1, 0.2, 0.3, 0.4), False),
    ],
)
def test_collapse_compares_the_last_window_with_the_best(
    values: Sequence[float], ends: bool
) -> None:
    rule = StopParams(collapse_fraction=0.5, collapse_window=2)
    assert (collapse(rewards(*values), rule) is not None) is ends


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((0.2, 0.2), True),
        ((0.2, None, 0.2), True),  # steps that measured none are not counted
        ((0.2, float("nan")), True),  # not a number is not below the limit
        ((0.2, 0.1), False),  # 0.1 is not above it
        ((0.2, 0.05, 0.2), False),  # not in a row
        ((0.2,), False),
    ],
)
def test_gap_needs_steps_in_a_row(values: Sequence[float | None], ends: bool) -> None:
    rule = StopParams(max_logprob_gap=0.1, gap_steps=2)
    assert (gap(gaps(*values), rule) is not None) is ends


def test_the_budget_ends_the_run_when_it_is_spent() -> None:
    assert gpu_hours(7.99, StopParams(max_gpu_hours=8)) is None
    assert gpu_hours(8.0, StopParams(max_gpu_hours=8)) == "gpu_hours: 8.000 spent of 8"


def test_no_rule_applies_unless_it_is_switched_on() -> None:
    history = scores(0.5, *[0.1] * 50) + rewards(*[1.0] * 20, *[0.0] * 20) + gaps(*[9.0] * 5)
    assert reason_to_stop(history, 1e6, StopParams()) is None


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        (StopParams(plateau_evals=50), "plateau"),
        (StopParams(collapse_fraction=0.5), "collapse"),
        (StopParams(max_logprob_gap=1.0), "gap"),
        (StopParams(max_gpu_hours=1.0), "gpu_hours"),
    ],
)
def test_the_reason_names_the_rule(params: StopParams, rule: str) -> None:
    history = scores(0.5, *[0.1] * 50) + rewards(*[1.0] * 20, *[0.0] * 20) + gaps(*[9.0] * 5)
    reason = reason_to_stop(history, 2.0, params)
    assert reason is not None
    assert reason.startswith(f"{rule}: ")
