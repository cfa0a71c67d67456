"""Learning-rate schedule over rollout batches, and the order in which problems are drawn."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from polyturn.params import LearnerParams
from polyturn.seeds import derive
from polyturn.types import Problem


def lr_scale(step: int, params: LearnerParams) -> float:
    """Fraction of learner.lr at a step (from 0): linear warm-up, then constant, linear or cosine decay.

    The decay is counted from step 0, beside the warm-up, and ends at min_lr_fraction after decay_steps, whatever train.steps
    is. Without a warm-up this is transformers' get_linear_schedule_with_warmup or get_cosine_schedule_with_warmup; with one
    theirs begins at 0 in place of 1 / warmup_steps, and decays only from its end on, so that it reaches 1.
    """
    warmup = min(1.0, (step + 1) / max(1, params.warmup_steps))
    if params.schedule == "constant":
        return warmup
    progress = min(1.0, step / params.decay_steps)
    shape = 1 - progress if params.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return warmup * (params.min_lr_fraction + (1 - params.min_lr_fraction) * shape)


def draw_problems(
    problems: Sequence[Problem], count: int, *, seed: int, step: int
) -> list[Problem]:
    """The `count` problems of a step: each epoch is its own shuffle, and steps go on where the last one ended.

    Raises:
        ValueError: there are fewer problems than a step needs.
    """
    if len(problems) < count:
        raise ValueError(
            f"rollout.prompts_per_step is {count}, but only {len(problems)} training problems are left; lower it "
            "or raise data.num_train"
        )
    places = [
        divmod(position, len(problems)) for position in range(step * count, (step + 1) * count)
    ]
    orders = {
        epoch: np.random.default_rng(derive(seed, "epoch", epoch)).permutation(len(problems))
        for epoch in {epoch for epoch, _ in places}
    }
    return [problems[int(orders[epoch][index])] for epoch, index in places]


def draw_more(
    problems: Sequence[Problem], count: int, *, drawn: Collection[str], path: tuple[int, int, int]
) -> list[Problem]:
    """Up to `count` further problems of a step, none whose id is in `drawn`; `path` is (seed, step, round).

    They come from a shuffle of their own, so that the order of the epochs does not depend on how many refills
    there were.
    """
    seed, step, number = path
    left = [problem for problem in problems if problem.id not in drawn]
    order = np.random.default_rng(derive(seed, "refill", step, number)).permutation(len(left))
    return [left[int(index)] for index in order[:count]]
