"""Stage `train`: GRPO from the warm start -> artifacts/policy, trajectories, train_curve.csv, train_run.json."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from polyturn import data, grpo, layout, lease, model
from polyturn.candidates import Candidates
from polyturn.learner.fsdp import FsdpLearner
from polyturn.metrics import curve_csv
from polyturn.params import Params
from polyturn.progress import Progress
from polyturn.recorder import Recorder
from polyturn.render import Renderer
from polyturn.runtime import set_up_torch
from polyturn.sampler.hf import HfSampler
from polyturn.types import Problem
from polyturn.work_key import work_key
from tasks.context import StageContext, run_stage, write_json

_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Train in the work directory of this run's key, then move the results into place."""
    params = ctx.params
    set_up_torch(params)
    engines = {"sampler": params.sampler.backend, "learner": params.learner.backend}
    ctx.run.set_tags(engines)
    work = _work_dir(ctx)
    with lease.hold(work.with_suffix(".lock"), what=f"training run {work.name}", parent=None):
        _train(ctx, work)


def _train(ctx: StageContext, work: Path) -> None:
    params = ctx.params
    is_resumed = params.train.resume != "never"
    if not is_resumed:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    policy = model.load(params.model, layout.WARMSTART)
    with Progress(params.train.steps, "train") as progress:
        recorder = Recorder(work, ctx.run, progress)
        parts = _parts(policy, params, recorder, work)
        best = asyncio.run(grpo.train(parts, params, resume=is_resumed))
    _publish(ctx, recorder, parts.candidates.path(best.version), best)
    ctx.leftovers.append(work)


def _work_dir(ctx: StageContext) -> Path:
    """train.work_uri (or the stage's own directory) / the key of everything that changes the result."""
    root = ctx.params.train.work_uri
    if "://" in root:
        raise ValueError(
            f"train.work_uri must be a local or shared path in this version, got {root}"
        )
    resume = ctx.params.train.resume
    if resume not in ("auto", "never"):
        raise ValueError(f"train.resume must be auto or never in this version, got {resume!r}")
    return (Path(root) if root else ctx.work_dir) / work_key("train", ctx.params)


def _parts(policy: model.Policy, params: Params, recorder: Recorder, work: Path) -> grpo.Parts:
    renderer = Renderer(policy)
    problems = data.read_problems(layout.PROBLEMS / "problems.jsonl", layout.IMAGES)
    _check_problems(params, policy, problems)
    is_frozen = params.learner.freeze_vision
    return grpo.Parts(
        sampler=HfSampler(policy, renderer, is_vision_frozen=is_frozen),
        learner=FsdpLearner(
            policy, renderer, params.learner, params.loss, params.rollout.temperature
        ),
        renderer=renderer,
        train=[problem for problem in problems if problem.split == "train"],
        validation=[problem for problem in problems if problem.split == "validation"],
        recorder=recorder,
        checkpoints=work / "checkpoints",
        candidates=Candidates(policy, work / "candidates"),
    )


def _check_problems(params: Params, policy: model.Policy, problems: Sequence[Problem]) -> None:
    if not any(problem.split == "validation" for problem in problems):
        raise ValueError(
            "data.num_validation: no validation problem is left to choose the best policy by; raise it, or see "
            "the reasons in artifacts/*/quarantine.jsonl"
        )
    limit = policy.model.config.text_config.max_position_embeddings
    if params.rollout.max_context_tokens > limit:
        raise ValueError(
            f"rollout.max_context_tokens is {params.rollout.max_context_tokens}, but the model has {limit} "
            "positions; lower it"
        )


def _publish(ctx: StageContext, recorder: Recorder, policy: Path, best: grpo.Best) -> None:
    for source, target in (
        (policy, layout.POLICY),
        (recorder.trajectory_dir, layout.TRAJECTORIES),
    ):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    layout.CURVE.write_text(curve_csv(recorder.history))
    published = model.load(ctx.params.model, layout.POLICY)
    digest = model.weights_digest(published.model)
    write_json(layout.TRAIN_RUN, {"run_id": ctx.run.run_id})
    ctx.run.set_tags({"weights.sha256": digest, "policy.version": best.version})
    ctx.run.log_metrics({"best/accuracy": best.accuracy, "best/version": best.version})
    _log.info(
        "train: published version %d, validation accuracy %.3f, weights %s",
        best.version,
        best.accuracy,
        digest[:12],
    )


if __name__ == "__main__":
    run_stage("train", body)
