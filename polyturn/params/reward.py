"""What a trajectory is worth."""

from __future__ import annotations

from typing import Literal

from polyturn.params.fields import Fraction, NonNegativeFloat, ObjectPath, PositiveFloat, Section


class RewardTermParams(Section):
    """One weighted reward term, `(trajectory, problem) -> float`."""

    term: ObjectPath
    weight: float = 1.0


class RewardParams(Section):
    """What a finished trajectory is worth."""

    terms: tuple[RewardTermParams, ...] = (RewardTermParams(term="polyturn.reward:correctness"),)
    rounding: Literal["reference", "strict"] = "reference"
    tolerance: NonNegativeFloat = 0.0  # relative
    timeout_s: PositiveFloat = 2.0  # of one symbolic comparison
    needs_box: bool = False  # an answer outside of \boxed{} or <answer> counts as none
    max_failure_fraction: Fraction = 0.05  # of a step's trajectories; above it the step stops
