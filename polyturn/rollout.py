"""Rollouts: groups of sibling trajectories, sampled in lockstep and in a fixed order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyturn.comparator import compare
from polyturn.envs.base import load_object
from polyturn.episode import Episode, EpisodeSettings
from polyturn.memory import lowered_by
from polyturn.params import EnvParams, Params, RewardParams, RolloutParams
from polyturn.render import Renderer
from polyturn.reward import Reward, check_failures, score
from polyturn.sampler.base import Sampler
from polyturn.seeds import SEED_RANGE
from polyturn.types import Group, Problem, StopReason, Trajectory

ENV_FAILURES = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)


@dataclass(frozen=True)
class RolloutSettings:
    """Everything about a rollout that is not the problems and the policy."""

    env: EnvParams
    rollout: RolloutParams
    reward: RewardParams

    @classmethod
    def of(cls, params: Params) -> RolloutSettings:
        """The settings of training."""
        return cls(params.env, params.rollout, params.reward)


@dataclass(frozen=True)
class Draw:
    """One rollout's own numbers: its derived seed, siblings per problem and temperature (0: greedy).

    `policy_version` is the version of the weights that must sample all of it; None: whichever the sampler has.
    """

    seed: int
    group_size: int
    temperature: float
    policy_version: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A problem to be tried by one group: the group's index and how often the step drew the problem before.

    Seeds depend on the problem's id and on `occurrence`, not on `group_index` or on what else is sampled: a process
    that samples only some groups of a step gets the trajectories that one process for all would get.
    """

    problem: Problem
    group_index: int
    occurrence: int = 0


class FailureBudgetError(ValueError):
    """More trajectories failed, or were aborted by their engine, than env.max_failure_fraction allows."""


async def rollout(
    problems: Sequence[Problem],
    sampler: Sampler,
    renderer: Renderer,
    settings: RolloutSettings,
    draw: Draw,
) -> list[Group]:
    """Try every problem `draw.group_size` times and grade the tries; group i is that of problem i.

    Raises:
        FailureBudgetError, RewardFailureError: see `check_budgets`.
        ComparisonError: see `rollout_attempts`.
    """
    groups = await rollout_attempts(attempts_of(problems), sampler, renderer, settings, draw)
    check_budgets(groups, settings)
    return groups


async def rollout_attempts(
    attempts: Sequence[Attempt],
    sampler: Sampler,
    renderer: Renderer,
    settings: RolloutSettings,
    draw: Draw,
) -> list[Group]:
    """Try every attempt's problem `draw.group_size` times and grade the tries; one group per attempt, in order.

    One sampler call per turn holds all live trajectories in (group, sibling) order; the environments' answers
    are awaited and put in order before the next call, so that equal seeds give equal trajectories. Trajectories
    that their environment failed are tried again, up to env.retries times, after the others have ended: these do
    not change by it.

    Budgets of failures are of all groups of a step, which a rank may have a part of: see `check_budgets`.

    Raises:
        ComparisonError: a compared trajectory is not the conversation that the chat template renders.
    """
    shared = EpisodeSettings(
        renderer,
        load_object(settings.env.build, "env.build"),
        settings.env,
        settings.rollout,
        draw.seed,
        draw.temperature,
        draw.policy_version,
    )
    episodes = [
        Episode(shared, attempt.problem, attempt.group_index, sibling, attempt.occurrence)
        for attempt in attempts
        for sibling in range(draw.group_size)
    ]
    await _play(episodes, sampler, settings.rollout)
    for _ in range(settings.env.retries):
        failed = [i for i, e in enumerate(episodes) if e.stop_reason in ENV_FAILURES]
        for place in failed:
            episodes[place] = episodes[place].again()
        await _play([episodes[place] for place in failed], sampler, settings.rollout)
    finished = [_finish(episode, settings.rollout.compare_fraction) for episode in episodes]
    graded = _grade(finished, settings.reward)
    size = draw.group_size
    return [
        Group(attempt.group_index, tuple(graded[place * size : (place + 1) * size]))
        for place, attempt in enumerate(attempts)
    ]


async def _play(episodes: Sequence[Episode], sampler: Sampler, limits: RolloutParams) -> None:
    """Take episodes from their start to their end, in lockstep or each by itself, and close their environments."""
    try:
        if not sampler.is_lockstep:
            # Siblings that arrive together compute their prompt each; apart, the later ones find it in the cache.
            apart = sorted(episodes, key=lambda episode: episode.sibling)
            await asyncio.gather(*(_play_alone(episode, sampler) for episode in apart))
            return
        await asyncio.gather(*(episode.start() for episode in episodes))
        while live := [episode for episode in episodes if not episode.is_done]:
            with lowered_by(f"sampling {len(live)} trajectories", _memory_keys(limits)):
                replies = await sampler.generate([episode.request() for episode in live])
            await asyncio.gather(
                *(e.advance(reply) for e, reply in zip(live, replies, strict=True))
            )
    finally:
        await asyncio.gather(*(episode.close() for episode in episodes))


async def _play_alone(episode: Episode, sampler: Sampler) -> None:
    """Take one episode to its end without waiting for the others: a slow environment holds up itself only."""
    await episode.start()
    while not episode.is_done:
        (reply,) = await sampler.generate([episode.request()])
        await episode.advance(reply)


def attempts_of(problems: Sequence[Problem]) -> list[Attempt]:
    """One attempt per problem, numbered in order."""
    numbers = occurrences(problems)
    return [
        Attempt(problem, index, occurrence)
        for index, (problem, occurrence) in enumerate(zip(problems, numbers, strict=True))
    ]


def occurrences(problems: Sequence[Problem]) -> list[int]:
    """How often each problem stands earlier in the list.

    For problems a, b, a the result is [0, 0, 1].
    """
    seen: Counter[str] = Counter()
    numbers: list[int] = []
    for problem in problems:
        numbers.append(seen[problem.id])
        seen[problem.id] += 1
    return numbers


def _finish(episode: Episode, compare_fraction: float) -> Trajectory:
    """The trajectory; a share of them, chosen by their seeds, is compared with the rendered conversation."""
    trajectory = episode.finish()
    is_chosen = episode.seed("compare") < compare_fraction * SEED_RANGE
    if not (is_chosen and trajectory.status.is_rewarded and trajectory.turns):
        return trajectory
    num_rewritten = compare(trajectory, episode.prompt, episode.settings.renderer)
    return replace(trajectory, num_rewritten=num_rewritten)


def _memory_keys(rollout: RolloutParams) -> dict[str, object]:
    return {
        "rollout.prompts_per_step": f"times group_size {rollout.group_size}",
        "rollout.max_context_tokens": rollout.max_context_tokens,
        "train.eval_batch_size or evaluate.batch_size": "while scoring",
    }


def check_budgets(
    groups: Sequence[Group], settings: RolloutSettings, *, out_of: int | None = None
) -> None:
    """Refuse groups of which too many trajectories failed or were aborted, or too many could not be graded.

    `out_of`: how many trajectories there will be, where the groups are those so far.

    Raises:
        FailureBudgetError: more trajectories have no reward than env.max_failure_fraction.
        RewardFailureError: more gradings failed than reward.max_failure_fraction.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    max_fraction = settings.env.max_failure_fraction
    failed = [t for t in trajectories if not t.status.is_rewarded]  # nothing here aborts on purpose
    count = out_of or len(trajectories)
    if len(failed) > max_fraction * count:
        raise FailureBudgetError(
            f"env.max_failure_fraction is {max_fraction}, but {len(failed)} of {count} trajectories "
            f"failed; the first: {failed[0].stop_reason}: {failed[0].error}"
        )
    graded = [t.reward_failures for t in trajectories if t.reward is not None]
    check_failures(graded, settings.reward, out_of=out_of)


def _grade(trajectories: Sequence[Trajectory], params: RewardParams) -> list[Trajectory]:
    """Put rewards on the trajectories that carry one; the others stay as they are."""
    rewards = {
        index: score(trajectory, trajectory.problem, params)
        for index, trajectory in enumerate(trajectories)
        if trajectory.status.is_rewarded
    }
    return [
        _with_reward(trajectory, rewards[index]) if index in rewards else trajectory
        for index, trajectory in enumerate(trajectories)
    ]


def _with_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    return replace(
        trajectory,
        reward=reward.total,
        reward_terms=dict(reward.terms),
        reward_failures=reward.failures,
    )
