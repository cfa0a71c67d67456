"""Scores the policy in training on the validation split, and says whether it is the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyturn.evaluation.evaluate import EvaluationPlan, evaluate, evaluation_settings, summarize
from polyturn.params import Params
from polyturn.seeds import derive
from polyturn.training.metrics import Metrics
from polyturn.training.parts import Parts
from polyturn.training.run_state import Best
from polyturn.types import Group


async def validate(parts: Parts, params: Params, version: int) -> tuple[Best, Metrics]:
    """The policy's score and its eval/ metrics; the same seeds at every version, used for nothing else."""
    plan = EvaluationPlan(
        seed=derive(params.seed, "validation"),
        samples_per_problem=1,
        temperature=params.rollout.temperature,
        batch_size=params.train.eval_batch_size,
        bootstrap_samples=params.train.eval_bootstrap_samples,
    )
    summary = summarize(await _groups(parts, params, plan), plan)
    score = Best(version, summary["accuracy"], summary["accuracy_low"])
    return score, {f"eval/{name}": value for name, value in summary.items()}


async def _groups(parts: Parts, params: Params, plan: EvaluationPlan) -> Sequence[Group]:
    """Every rank tries its part of the problems; all groups by index, on every rank."""
    world = parts.world
    numbers = world.owned(range(len(parts.validation)))
    with world.together():
        mine = await evaluate(
            world.owned(parts.validation),
            parts.sampler,
            parts.renderer,
            evaluation_settings(params),
            plan,
        )
    numbered = [replace(group, index=number) for number, group in zip(numbers, mine, strict=True)]
    return world.gather(numbered)
