"""Scores the policy in training on the validation split, and says whether it is the best so far."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.evaluate import EvaluationPlan, evaluate, evaluation_settings, summarize
from polyturn.metrics import Metrics
from polyturn.params import Params
from polyturn.render import Renderer
from polyturn.run_state import Best
from polyturn.sampler.base import Sampler
from polyturn.seeds import derive
from polyturn.types import Problem


async def validate(
    problems: Sequence[Problem], sampler: Sampler, renderer: Renderer, params: Params, version: int
) -> tuple[Best, Metrics]:
    """The policy's score and its eval/ metrics; the same seeds at every version, used for nothing else."""
    plan = EvaluationPlan(
        seed=derive(params.seed, "validation"),
        samples_per_problem=1,
        temperature=params.rollout.temperature,
        batch_size=params.train.eval_batch_size,
        bootstrap_samples=params.train.eval_bootstrap_samples,
    )
    groups = await evaluate(problems, sampler, renderer, evaluation_settings(params), plan)
    summary = summarize(groups, plan)
    score = Best(version, summary["accuracy"], summary["accuracy_low"])
    return score, {f"eval/{name}": value for name, value in summary.items()}
