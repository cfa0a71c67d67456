"""The groups that a step trains on: sampled in rounds, filtered, accepted by index (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn.group_filters import load_filters, refusal
from polyturn.params import Params
from polyturn.params.train import DynamicSamplingParams
from polyturn.rollout import (
    Attempt,
    Draw,
    RolloutSettings,
    attempts_of,
    check_budgets,
    rollout_attempts,
)
from polyturn.seeds import derive
from polyturn.training.metrics import Metrics
from polyturn.training.parts import Parts
from polyturn.training.saved_rollouts import check_steps, saved_groups
from polyturn.training.schedule import draw_more, draw_problems
from polyturn.types import Group, Problem

logger = logging.getLogger(__name__)

SURPLUS = "surplus"  # accepted by all filters, but the step has its groups already
_FILTERS = "train.dynamic_sampling.filters"
_PREFIX = "rollout/dynamic_filter"


@dataclass(frozen=True)
class Collected:
    """All groups that a step sampled, those that it trains on (both in order of index), and the counts."""

    sampled: Sequence[Group]
    kept: Sequence[Group]
    metrics: Metrics


def check_start(problems: Sequence[Problem], params: Params) -> None:
    """What would stop the first steps, asked before anything is sampled or scored.

    Raises:
        ValueError: fewer problems than a round draws, a filter that cannot be imported, step files that are missing.
    """
    if params.train.debug.mode == "train_only":
        check_steps(Path(params.train.debug.rollouts), params.train.steps)
        return
    rules = params.train.dynamic_sampling
    load_filters(rules.filters, _FILTERS)
    if rules.prompts_per_round is not None and rules.prompts_per_round > len(problems):
        raise ValueError(
            f"train.dynamic_sampling.prompts_per_round is {rules.prompts_per_round}, but only {len(problems)} training "
            "problems are left; lower it or raise data.num_train"
        )
    _draw(problems, params, 0, 0, [])


async def collect(
    parts: Parts, params: Params, step: int, *, policy_version: int | None = None
) -> Collected:
    """The groups of a step: read from train.debug.rollouts, or sampled; see `sample_rounds`.

    `policy_version` is that of the weights which the sampler has, None: the step's own.
    """
    if params.train.debug.mode == "train_only":
        groups = saved_groups(Path(params.train.debug.rollouts), step, parts.train)
        return Collected(groups, groups, {})
    version = step if policy_version is None else policy_version
    weights_stay = params.train.debug.mode == "rollout_only"
    draw = Draw(
        derive(params.seed, "rollout", step),
        params.rollout.group_size,
        params.rollout.temperature,
        policy_version=None if weights_stay else version,
    )
    return await sample_rounds(parts, params, step, draw)


async def sample_rounds(parts: Parts, params: Params, step: int, draw: Draw) -> Collected:
    """Sample rounds of groups until rollout.prompts_per_step are acceptable or the budget of rounds is spent.

    A round is complete before its groups are looked at, and the first acceptable ones by index are kept, so that
    neither timing nor the length of answers decides. Short of the wanted number, after max_rounds or without
    problems left, the step trains on what there is: a warning, and `is_exhausted` among the counts.

    Raises:
        ValueError: a filter cannot be imported or failed; the message names its key.
        FailureBudgetError, RewardFailureError: too many trajectories of the step, of all ranks, failed.
    """
    rules = params.train.dynamic_sampling
    filters = load_filters(rules.filters, _FILTERS)
    wanted = params.rollout.prompts_per_step
    drawn: list[Problem] = []
    sampled: list[Group] = []
    kept: list[Group] = []
    dropped = Counter[str]()
    rounds = 0
    while len(kept) < wanted and rounds < rules.max_rounds:
        problems = _draw(parts.train, params, step, rounds, drawn)
        if not problems:
            break
        attempts = attempts_of([*drawn, *problems])[len(drawn) :]
        drawn += problems
        rounds += 1
        groups = await sample(attempts, parts, params, draw)
        check_budgets([*sampled, *groups], RolloutSettings.of(params))  # of a step, not of a round
        for group in groups:
            sampled.append(group)
            reason = refusal(group, filters) or (SURPLUS if len(kept) == wanted else None)
            if reason is None:
                kept.append(group)
            else:
                dropped[reason] += 1
    is_exhausted = len(kept) < wanted
    if is_exhausted:
        logger.warning(
            "step %d trains on %d groups instead of %d: %d rounds gave %d groups, refused by %s; raise "
            "train.dynamic_sampling.max_rounds or prompts_per_round, or look at the filters",
            *(step, len(kept), wanted, rounds, len(sampled), dict(dropped)),
        )
    if rules == DynamicSamplingParams():  # nothing can be refused: nothing to count
        return Collected(sampled, kept, {})
    counts = {
        "rounds": rounds,
        "groups_sampled": len(sampled),
        "groups_kept": len(kept),
        "is_exhausted": is_exhausted,
        **{f"drop_{name}": dropped[name] for name in (*(f.name for f in filters), SURPLUS)},
    }
    return Collected(
        sampled, kept, {f"{_PREFIX}/{name}": float(count) for name, count in counts.items()}
    )


def _draw(
    problems: Sequence[Problem], params: Params, step: int, number: int, drawn: Sequence[Problem]
) -> list[Problem]:
    """The problems of a step's round: the first follows the epochs, refills take what the step has not drawn."""
    count = params.train.dynamic_sampling.prompts_per_round or params.rollout.prompts_per_step
    if number == 0:
        return draw_problems(problems, count, seed=params.seed, step=step)
    return draw_more(
        problems,
        count,
        drawn={problem.id for problem in drawn},
        path=(params.seed, step, number),
    )


async def sample(
    attempts: Sequence[Attempt], parts: Parts, params: Params, draw: Draw
) -> list[Group]:
    """Try the problems of a round, each on the rank that owns its group; all groups by index, on every rank."""
    settings = RolloutSettings.of(params)
    owned = [attempt for attempt in attempts if parts.world.owns(attempt.group_index)]
    with parts.world.together():
        own = await rollout_attempts(owned, parts.sampler, parts.renderer, settings, draw)
    return parts.world.gather(own)
