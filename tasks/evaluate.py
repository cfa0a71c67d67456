"""Stage `evaluate`: warm start and published policy on the test split -> metrics.json, artifacts/evaluation."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from polyturn import data, layout, trajectories
from polyturn.data.files import write_jsonl
from polyturn.determinism import choose_kernels
from polyturn.evaluation import evaluation_set, results
from polyturn.evaluation.evaluate import (
    TRAINING_ENV,
    EvaluationPlan,
    evaluate,
    evaluation_settings,
    problem_results,
    summarize,
)
from polyturn.params import Params
from polyturn.policy import model
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.rollout import RolloutSettings
from polyturn.runtime import set_up_torch, training_device
from polyturn.sampler.base import Sampler
from polyturn.seeds import derive
from polyturn.training.metrics import trajectories_of
from polyturn.training.recorder import records
from polyturn.types import Group, Problem
from tasks.context import StageContext, run_stage, write_json
from tasks.samplers import SamplerPlace, open_sampler

_log = logging.getLogger(__name__)

POLICIES: Mapping[str, Path] = {"warmstart": layout.WARMSTART, "policy": layout.POLICY}


@dataclass(frozen=True)
class Scored:
    """One policy under one way of decoding."""

    policy: str
    decoding: str
    groups: Sequence[Group]
    summary: Mapping[str, float]


@dataclass(frozen=True)
class _Exam:
    """What every policy is asked, and how."""

    test: Sequence[Problem]
    params: Params
    plans: Mapping[str, EvaluationPlan]
    progress: Progress


def body(ctx: StageContext) -> None:
    """Score both policies, sampled and greedy, on the same problems with the same seeds.

    Where env.eval_params change the environment, they are scored in training's environment as well.
    """
    set_up_torch(ctx.params)
    choose_kernels(ctx.params)
    problems = data.read_problems(layout.PROBLEMS / "problems.jsonl", layout.IMAGES)
    test = evaluation_set.choose(problems, ctx.params)
    plans = plans_of(ctx.params)
    with Progress(len(test) * len(plans) * len(POLICIES), "evaluate") as progress:
        scored = _score_policies(_Exam(test, ctx.params, plans, progress))
    _write(ctx, test, scored)


def plans_of(params: Params) -> Mapping[str, EvaluationPlan]:
    """How policies are scored, by name of the score; all with the same seed."""
    settings = params.evaluate
    seed = derive(params.seed, "test")

    def plan(samples: int, temperature: float) -> EvaluationPlan:
        return EvaluationPlan(
            seed, samples, temperature, settings.batch_size, settings.bootstrap_samples
        )

    sampled = plan(settings.samples_per_problem, settings.temperature)
    plans = {"sampled": sampled}
    plans |= {"greedy": plan(1, 0.0)} if settings.greedy else {}
    return plans | ({TRAINING_ENV: sampled} if params.env.eval_params else {})


def _score_policies(exam: _Exam) -> list[Scored]:
    """All policies in one sampler, since a server takes a minute to start; versions are their numbers."""
    params, first = exam.params, next(iter(POLICIES.values()))
    policy = model.load(params.model, first)
    torch.nn.Module.to(policy.model, training_device(params.learner))
    place = SamplerPlace(first, layout.STATE / "work" / "evaluate", is_vision_frozen=False)
    scored = []
    with closing(open_sampler(policy, params, place)) as sampler:
        for version, (name, directory) in enumerate(POLICIES.items()):
            if directory != first:
                other = model.load(params.model, directory)
                policy.model.load_state_dict(other.model.state_dict())
            sampler.update_weights(policy.model.named_parameters(remove_duplicate=False), version)
            scored += _scores(name, policy, sampler, exam)
    return scored


def _scores(name: str, policy: model.Policy, sampler: Sampler, exam: _Exam) -> list[Scored]:
    params = exam.params
    renderer = Renderer(policy)
    scored = []
    for decoding, plan in exam.plans.items():
        settings = (
            RolloutSettings.of(params) if decoding == TRAINING_ENV else evaluation_settings(params)
        )
        groups = asyncio.run(
            evaluate(exam.test, sampler, renderer, settings, plan, on_batch=exam.progress.update)
        )
        summary = summarize(groups, plan)
        scored.append(Scored(name, decoding, groups, summary))
        _log.info(
            "evaluate: %s %s accuracy %.3f (%.3f to %.3f), %.2f turns",
            name,
            decoding,
            summary["accuracy"],
            summary["accuracy_low"],
            summary["accuracy_high"],
            summary["turns_mean"],
        )
    return scored


def _write(ctx: StageContext, test: Sequence[Problem], scored: Sequence[Scored]) -> None:
    blocks: dict[str, dict[str, Mapping[str, float]]] = {}
    for item in scored:
        blocks.setdefault(item.policy, {})[item.decoding] = dict(item.summary)
    ctx.run.log_metrics(results.scores(blocks))
    shutil.rmtree(layout.EVALUATION, ignore_errors=True)
    by_problem = problem_results(
        test,
        {f"{item.policy}/{item.decoding}": item.groups for item in scored},
        ctx.params.evaluate.kind_columns,
    )
    write_jsonl(layout.EVALUATION / results.RESULTS, map(results.to_row, by_problem))
    _save_trajectories(scored, ctx.params.evaluate.num_saved_trajectories)
    write_json(layout.METRICS, {"test": {"num_problems": len(test), **blocks}})


def _save_trajectories(scored: Sequence[Scored], number: int) -> None:
    """Keep the first `number` problems' sampled tries of both policies: step 0 the warm start, 1 the policy."""
    kept = []
    for item in scored:
        if item.decoding != "sampled":
            continue
        groups = item.groups[:number]
        advantages = [[None] * len(group.trajectories) for group in groups]
        kept += records(groups, advantages, step=list(POLICIES).index(item.policy))
        for trajectory in trajectories_of(groups):
            made = trajectory.images[len(trajectory.problem.images) :]
            trajectories.save_pictures(layout.EVALUATION / "png", made)
    trajectories.write_records(layout.EVALUATION / "trajectories.jsonl.gz", kept)


if __name__ == "__main__":
    run_stage("evaluate", body)
