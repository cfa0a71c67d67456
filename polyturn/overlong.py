"""Reward shaping for trajectories that come close to the length limit (DAPO, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyturn.types import Problem, Trajectory

if TYPE_CHECKING:
    from polyturn.params import RewardParams


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, then linearly down to -1 at max_tokens, and -1 beyond (eq. 13).

    >>> [overlong_penalty(n, max_tokens=100, buffer_tokens=20) for n in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(excess, 0), buffer_tokens) / buffer_tokens + 0.0  # + 0.0: no -0.0


def soft_overlong_punishment(
    trajectory: Trajectory, problem: Problem, *, params: RewardParams
) -> float:
    """Reward term: the penalty of the tokens sampled over all turns, with the lengths of reward.overlong."""
    del problem
    assert params.overlong is not None  # RewardParams refuses the term without
    lengths = params.overlong
    return overlong_penalty(
        trajectory.num_sampled,
        max_tokens=lengths.max_tokens,
        buffer_tokens=lengths.buffer_tokens,
    )
