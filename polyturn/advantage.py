"""Group-relative advantages (GRPO, arXiv:2402.03300, eq. 4), in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyturn.types import Group


def group_advantages(rewards: Sequence[float | None], *, normalize_std: bool) -> list[float | None]:
    """Advantage of each sibling of one group: reward minus the group's mean, divided by its sample deviation.

    Siblings without a reward (failed, aborted) get None and leave the baseline. Equal rewards, and a group with
    fewer than two rewards, give exactly 0: float residue is never divided by a deviation of zero.

        >>> group_advantages([1.0, 0.0, 0.0, 0.0], normalize_std=False)
        [0.75, -0.25, -0.25, -0.25]
        >>> group_advantages([1.0, 0.0, 0.0, 0.0], normalize_std=True)
        [1.5, -0.5, -0.5, -0.5]
        >>> group_advantages([0.9, None, 0.9], normalize_std=True)
        [0.0, None, 0.0]
    """
    known = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if len(known) < 2 or (known == known[0]).all():
        return [None if reward is None else 0.0 for reward in rewards]
    scale = float(known.std(ddof=1)) if normalize_std else 1.0
    mean = float(known.mean())
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def advantages_of(groups: Sequence[Group], *, normalize_std: bool) -> list[list[float | None]]:
    """Advantages of all groups, each compared only with itself; see `group_advantages`."""
    return [
        group_advantages([t.reward for t in group.trajectories], normalize_std=normalize_std)
        for group in groups
    ]
