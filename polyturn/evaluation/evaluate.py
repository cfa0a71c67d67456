"""Scores a policy on a split: every problem tried, accuracy with a bootstrap interval, pass@k, turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyturn.advantage import RESOLUTION
from polyturn.evaluation.results import ProblemResult, end_of
from polyturn.evaluation.statistics import bootstrap_interval, pass_at_k
from polyturn.params import Params
from polyturn.render import Renderer
from polyturn.rollout import (
    Draw,
    RolloutSettings,
    attempts_of,
    check_budgets,
    rollout_attempts,
)
from polyturn.sampler.base import Sampler
from polyturn.training.metrics import trajectories_of
from polyturn.types import Group, Problem, Status, Trajectory

CORRECT = 1.0  # a value that counts as solved
TRAINING_ENV = (
    "training_env"  # name of the scores under training's environment (no env.eval_params)
)


@dataclass(frozen=True)
class EvaluationPlan:
    """How a policy is scored; `temperature` 0 is greedy (one try per problem is then enough)."""

    seed: int
    samples_per_problem: int
    temperature: float
    batch_size: int
    bootstrap_samples: int


def evaluation_settings(params: Params) -> RolloutSettings:
    """Training's settings under env.eval_params (e.g. an oracle switched off)."""
    env = params.env.model_copy(update={"params": {**params.env.params, **params.env.eval_params}})
    return replace(RolloutSettings.of(params), env=env)


async def evaluate(
    problems: Sequence[Problem],
    sampler: Sampler,
    renderer: Renderer,
    settings: RolloutSettings,
    plan: EvaluationPlan,
    on_batch: Callable[[int], None] = lambda _: None,
) -> list[Group]:
    """Try every problem; problems are sampled together in batches, `on_batch` hears how many are done.

    A try's seed depends on plan.seed, the problem's id and the number of the try, and on nothing else. Budgets of
    failures are of the whole evaluation: it stops once they are spent, and not because the last batch is small.

    Raises:
        FailureBudgetError, RewardFailureError: see `check_budgets`.
    """
    draw = Draw(plan.seed, plan.samples_per_problem, plan.temperature)
    per_batch = max(1, plan.batch_size // plan.samples_per_problem)
    groups: list[Group] = []
    for first in range(0, len(problems), per_batch):
        chunk = problems[first : first + per_batch]
        attempts = attempts_of(chunk)
        for group in await rollout_attempts(attempts, sampler, renderer, settings, draw):
            groups.append(Group(first + group.index, group.trajectories))
        check_budgets(groups, settings, out_of=len(problems) * plan.samples_per_problem)
        on_batch(len(chunk))
    return groups


def is_correct(trajectory: Trajectory) -> bool:
    """Whether a try solved its problem: by the `correctness` term where there is one, else by the whole reward.

    A failed trajectory, which carries no reward, did not. Weights that add up to 1 need not do so in float64
    (0.7 + 0.2 + 0.1 is below 1).
    """
    if trajectory.reward is None:
        return False
    return trajectory.reward_terms.get("correctness", trajectory.reward) >= CORRECT - RESOLUTION


def summarize(groups: Sequence[Group], plan: EvaluationPlan) -> Mapping[str, float]:
    """Accuracy (mean over problems of the share of correct tries) with its 95% interval over problems, and more.

    Failed trajectories count as wrong, and their share is in `failed_fraction`.
    """
    correct = [[is_correct(t) for t in group.trajectories] for group in groups]
    shares = [float(np.mean(tries)) for tries in correct]
    interval = bootstrap_interval(shares, num_samples=plan.bootstrap_samples, seed=plan.seed)
    trajectories = trajectories_of(groups)
    count = len(trajectories)
    summary = {
        "accuracy": float(np.mean(shares)),
        "accuracy_low": interval.low,
        "accuracy_high": interval.high,
        "turns_mean": float(np.mean([len(t.turns) for t in trajectories])),
        "tokens_mean": float(np.mean([t.num_sampled for t in trajectories])),
        "images_mean": float(np.mean([len(t.images) for t in trajectories])),
        "truncated_fraction": sum(t.status is Status.TRUNCATED for t in trajectories) / count,
        "failed_fraction": sum(not t.status.is_rewarded for t in trajectories) / count,
    }
    k = 1
    while k <= plan.samples_per_problem:
        scores = [pass_at_k(len(tries), sum(tries), k) for tries in correct]
        summary[f"pass@{k}"] = float(np.mean(scores))
        k *= 2
    return summary


def problem_results(
    problems: Sequence[Problem],
    scores: Mapping[str, Sequence[Group]],
    kind_columns: Sequence[str],
) -> list[ProblemResult]:
    """Each problem with its tries under every score (POLICY/DECODING -> groups in the problems' order)."""
    return [
        ProblemResult(
            id=problem.id,
            answer=problem.answer,
            correct={
                name: tuple(is_correct(t) for t in groups[index].trajectories)
                for name, groups in scores.items()
            },
            kind=kind_of(problem, kind_columns),
            question="\n".join(message.text for message in problem.messages),
            pictures=tuple(image.sha256 for image in problem.images),
            replies={
                name: end_of(_last_reply(groups[index].trajectories[0]))
                for name, groups in scores.items()
            },
        )
        for index, problem in enumerate(problems)
    ]


def kind_of(problem: Problem, columns: Sequence[str]) -> str:
    """The problem's kind: the values of its `columns` joined; "" where it has none of them."""
    return " ".join(str(problem.metadata[name]) for name in columns if name in problem.metadata)


def _last_reply(trajectory: Trajectory) -> str:
    return trajectory.turns[-1].reply_text if trajectory.turns else ""
