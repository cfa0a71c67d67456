"""Group-relative advantages in float64: GRPO, RLOO, REINFORCE++ baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyturn.params import LossParams
from polyturn.types import Group

# Rewards that differ by less than this part of the largest of them are equal: what is left of float32 sums of
# reward terms (1e-7) must not be divided by a deviation that is such a residue too.
RESOLUTION = 1e-6
# So are rewards this near to each other, however small they are: terms of about 1 that cancel leave so much of
# themselves in float32 (0.3 + 0.6 - 0.9 is 6e-8), and next to a 0 it is all there is.
FLOOR = 1e-7


@dataclass(frozen=True)
class Outcome:
    """The reward of one training sample and whom it is compared with.

    A rollout that was split into several samples counts once: they have one `rollout` (any number that is unique
    in its group) and one reward. `reward` is None for rollouts that were aborted or failed.
    """

    group: int
    rollout: int
    reward: float | None


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by rounding residue at most, so that they teach nothing.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.1 + 0.2 - 0.3, 0.0]), are_equal([0.3, 0.3001]), are_equal([])
    (True, True, False, True)
    """
    if not rewards:
        return True
    largest = max(abs(reward) for reward in rewards)
    return max(rewards) - min(rewards) <= max(RESOLUTION * largest, FLOOR)


def group_advantages(
    rewards: Sequence[float | None], *, normalize_std: bool, leave_one_out: bool = False
) -> list[float | None]:
    """Advantage of each sibling of one group: reward minus the group's mean, divided by its sample deviation.

    GRPO (arXiv:2402.03300, section 4.1.2), without deviation Dr. GRPO (arXiv:2503.20783). With `leave_one_out` the
    mean is that of the other siblings (RLOO, arXiv:2402.14740), the deviation still the whole group's.
    Siblings without a reward (failed, aborted) get None and leave the baseline. Equal rewards, and a group with
    fewer than two rewards, give exactly 0. Sums are exact, so that the order of siblings changes nothing.

        >>> group_advantages([1.0, 0.0, 0.0, 0.0], normalize_std=False)
        [0.75, -0.25, -0.25, -0.25]
        >>> group_advantages([1.0, 0.0, 0.0, 0.0], normalize_std=True)
        [1.5, -0.5, -0.5, -0.5]
        >>> group_advantages([1.0, 0.0, 0.0], normalize_std=False, leave_one_out=True)
        [1.0, -0.5, -0.5]
        >>> group_advantages([0.9, None, 0.9], normalize_std=True)
        [0.0, None, 0.0]
    """
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or are_equal(known):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    scale = _deviation([reward - mean for reward in known]) if normalize_std else 1.0
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    gain = len(known) / (len(known) - 1) if leave_one_out else 1.0
    return [None if reward is None else (reward - mean) * gain / scale for reward in rewards]


def advantages(outcomes: Sequence[Outcome], params: LossParams) -> list[float | None]:
    """The advantage of each sample of a rollout batch; groups may be uneven and in any order.

    Rollout 0 of the group is split into three samples; the baseline of its reward 1 and the other's 0 is 0.5:

        >>> split = [Outcome(7, 0, 1.0), Outcome(7, 0, 1.0), Outcome(7, 0, 1.0), Outcome(7, 1, 0.0)]
        >>> advantages(split, LossParams(normalize_std=False))
        [0.5, 0.5, 0.5, -0.5]

    reinforce_plus_plus_baseline (arXiv:2501.03262) divides by the deviation over all rollouts of the
    batch instead of the group's; their mean is 0 as it is that of every group.

    Raises:
        ValueError: a reward is not finite, or samples of one rollout differ in their reward.
    """
    groups: dict[int, dict[int, float | None]] = {}
    for outcome in outcomes:
        rollouts = groups.setdefault(outcome.group, {})
        _check(outcome, rollouts)
        rollouts[outcome.rollout] = outcome.reward
    scales_by_batch = params.advantage_estimator == "reinforce_plus_plus_baseline"
    found: dict[int, dict[int, float | None]] = {}
    for group, rollouts in groups.items():
        values = group_advantages(
            list(rollouts.values()),
            normalize_std=params.normalize_std and not scales_by_batch,
            leave_one_out=params.advantage_estimator == "rloo",
        )
        found[group] = dict(zip(rollouts, values, strict=True))
    if scales_by_batch:
        found = _divided_by_deviation(found)
    return [found[outcome.group][outcome.rollout] for outcome in outcomes]


def advantages_of(groups: Sequence[Group], params: LossParams) -> list[list[float | None]]:
    """Advantages of all trajectories of a rollout batch, row by row; see `advantages`."""
    flat = iter(
        advantages(
            [
                Outcome(number, trajectory.sibling, trajectory.reward)
                for number, group in enumerate(groups)
                for trajectory in group.trajectories
            ],
            params,
        )
    )
    return [[next(flat) for _ in group.trajectories] for group in groups]


def _check(outcome: Outcome, rollouts: Mapping[int, float | None]) -> None:
    reward = outcome.reward
    if reward is not None and not math.isfinite(reward):
        raise ValueError(
            f"the reward of group {outcome.group}, rollout {outcome.rollout} is {reward}; reward terms must be finite"
        )
    if outcome.rollout in rollouts and rollouts[outcome.rollout] != reward:
        raise ValueError(
            f"group {outcome.group}, rollout {outcome.rollout}: its samples have rewards "
            f"{rollouts[outcome.rollout]} and {reward}, but a rollout has one reward"
        )


def _divided_by_deviation(
    groups: Mapping[int, Mapping[int, float | None]],
) -> dict[int, dict[int, float | None]]:
    values = [value for group in groups.values() for value in group.values() if value is not None]
    scale = _deviation(values) if any(values) else 1.0
    return {
        group: {
            rollout: None if value is None else value / scale for rollout, value in rollouts.items()
        }
        for group, rollouts in groups.items()
    }


def _deviation(centred: Sequence[float]) -> float:
    """Sample standard deviation of two or more values whose mean is 0, of any size.

    They are squared in units of a power of two near the largest, which rounds nothing: 1e200 has no square in float64.
    """
    _, exponent = math.frexp(max(abs(value) for value in centred))
    units = [math.ldexp(value, -exponent) for value in centred]
    squares = math.fsum(value * value for value in units)
    return math.ldexp(math.sqrt(squares / (len(centred) - 1)), exponent)
