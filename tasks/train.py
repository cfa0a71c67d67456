"""Stage `train`: GRPO from the warm start -> artifacts/policy, trajectories, train_curve.csv, train_run.json."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from polyturn import layout
from polyturn.params import Params
from polyturn.pictures import Pictures
from polyturn.policy import model
from polyturn.replayable import is_replayable
from polyturn.tracking import stop_tag
from polyturn.tracking.gallery import log_step_files
from polyturn.training import stop_request
from polyturn.training.recorder import PICTURES
from polyturn.trajectory_times import times_directory
from tasks import continuation, preflight, ranks, training
from tasks.context import PARENT_RUN, StageContext, run_stage, write_json
from tasks.place import occupy

_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Train in the work directory of this run's key, then move the results into place."""
    params = ctx.params
    engines = {"sampler": params.sampler.backend, "learner": params.learner.backend}
    ctx.run.set_tags({**engines, "num_processes": params.learner.num_processes})
    ctx.run.set_tags(_labels(params))
    preflight.check()
    place = occupy(ctx)
    work = place.directory
    ctx.run.set_tags({continuation.WORK_TAG: place.address})
    if params.train.resume not in ("auto", "never"):
        continuation.adopt(ctx, place)
    run_ids = [ctx.run.run_id, *filter(None, [os.environ.get(PARENT_RUN)])]
    stop_request.announce(stop_request.Running(work, run_ids))
    stop_tag.watch(ctx.run, work)
    with place.working():
        if params.learner.num_processes == 1 and params.train.launcher == "local":
            training.train(params, work, ctx.run)
        else:
            ranks.run_ranks(params, work, ctx.run.run_id)
    _publish(ctx, work)


def _labels(params: Params) -> dict[str, object]:
    """Whether the run again would give the same bytes, and which debug mode makes it a run of one half."""
    mode = params.train.debug.mode
    if mode == "off":
        return {"replayable": is_replayable(params)}
    _log.warning("train: train.debug.mode is %s; what comes out is not a trained policy", mode)
    return {"replayable": is_replayable(params), "debug.mode": mode}


def _publish(ctx: StageContext, work: Path) -> None:
    outcome = training.outcome_in(work)
    best, stopped = outcome.best, outcome.stopped
    for source, target in (
        (training.published_in(work, best), layout.POLICY),
        (training.trajectories_in(work), layout.TRAJECTORIES),
    ):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    shutil.copy(work / training.CURVE, layout.CURVE)
    _show_trajectories(ctx, times_directory(training.trajectories_in(work)))
    digest = model.saved_digest(ctx.params.model, layout.POLICY)
    early = {"stopped_at": stopped.step, "stop_reason": stopped.reason} if stopped else {}
    write_json(layout.TRAIN_RUN, {"run_id": ctx.run.run_id, **early})
    ctx.run.set_tags(early)
    ctx.run.set_tags({"weights.sha256": digest, "policy.version": best.version})
    ctx.run.log_metrics({"best/accuracy": best.accuracy, "best/version": best.version})
    if stopped:
        _log.info(
            "train: stopped after step %d of %d: %s",
            stopped.step,
            ctx.params.train.steps,
            stopped.reason,
        )
    _log.info(
        "train: published version %d, validation accuracy %.3f, weights %s",
        best.version,
        best.accuracy,
        digest[:12],
    )


def _show_trajectories(ctx: StageContext, times: Path) -> None:
    """Put the times beside the out (they are no part of it), and some step files into the MLflow run."""
    target = times_directory(layout.TRAJECTORIES)
    shutil.rmtree(target, ignore_errors=True)
    if times.exists():
        shutil.copytree(times, target)
    log_step_files(
        ctx.run,
        layout.TRAJECTORIES,
        ctx.params.tracking.trajectory_files,
        pictures=Pictures([layout.TRAJECTORIES / PICTURES, layout.IMAGES / PICTURES]),
        tokenizer=layout.POLICY / "tokenizer.json",
    )


if __name__ == "__main__":
    run_stage("train", body)
