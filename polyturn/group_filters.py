"""Filters of groups, `(group) -> bool`: which groups are worth training on. Shipped ones, and how others are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.advantage import are_equal
from polyturn.envs.base import load_object
from polyturn.evaluation.evaluate import is_correct
from polyturn.types import Group, Status


def nonzero_std(group: Group) -> bool:
    """Whether the siblings' rewards differ: equal ones give no gradient."""
    return not are_equal([t.reward for t in group.trajectories if t.reward is not None])


def mixed_correctness(group: Group) -> bool:
    """Whether some of the siblings solved the problem and others did not (DAPO, arXiv:2503.14476, eq. 11).

    Further reward terms do not count: where all are wrong and one is too long besides, `nonzero_std` keeps the group,
    and its short wrong answers are taught.
    """
    return len({is_correct(t) for t in group.trajectories if t.reward is not None}) > 1


def no_aborted(group: Group) -> bool:
    """Whether no sibling was aborted, so that a group is either whole or not trained on."""
    return all(t.status is not Status.ABORTED for t in group.trajectories)


@dataclass(frozen=True)
class GroupFilter:
    """A filter with the params key that named it; `name` counts what it refuses."""

    key: str
    name: str
    function: Callable[[Group], object]

    def accepts(self, group: Group) -> bool:
        """Whether the group may be trained on.

        Raises:
            ValueError: the filter failed or did not return a bool; the message names the key.
        """
        try:
            answer = self.function(group)
        except Exception as error:
            problem = group.trajectories[0].problem.id
            raise ValueError(
                f"{self.key}: filter {self.name} failed on the group of problem {problem}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise ValueError(
                f"{self.key}: filter {self.name} must return True or False, got {answer!r}"
            )
        return bool(answer)


def load_filters(paths: Sequence[str], key: str) -> list[GroupFilter]:
    """Import the filters that params key `key` lists.

    Raises:
        ValueError: one cannot be imported; see `load_object`.
    """
    return [
        GroupFilter(f"{key}[{index}]", path.partition(":")[2], load_object(path, f"{key}[{index}]"))
        for index, path in enumerate(paths)
    ]


def refusal(group: Group, filters: Sequence[GroupFilter]) -> str | None:
    """Name of the first filter that refuses the group; None if all accept it."""
    return next((f.name for f in filters if not f.accepts(group)), None)
