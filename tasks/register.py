"""Stage register: the published policy with its evaluation -> a version in the MLflow registry, and the report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from polyturn import layout, tracking
from polyturn.cli import card as card_cli
from polyturn.evaluation import evaluation_set, results
from polyturn.evaluation.statistics import Interval
from polyturn.params import Params, load
from polyturn.pictures import Pictures
from polyturn.pipeline import accepted
from polyturn.report.data import picture_directories, read_run
from polyturn.report.page import choose
from polyturn.report.write import write_report
from polyturn.tracking import (
    environment,
    evaluations,
    lineage,
    promotion,
    record,
    registry,
    traces,
)
from polyturn.tracking.run import attach_run
from tasks.context import PARENT_RUN, StageContext, run_stage, write_json

logger = logging.getLogger(__name__)

_PASS = "pass@"
_EXPERIMENT = "DVC_EXP_NAME"  # set by `dvc exp run`


def register(context: StageContext) -> None:
    """Register artifacts/policy and write registered.json.

    Raises:
        ValueError: metrics.json or train_run.json is missing or lacks what registration needs.
    """
    params = context.params
    scores = _scores(_read(layout.METRICS))
    candidate = registry.Candidate(
        directory=layout.POLICY,
        evaluation=evaluation_set.digest(layout.PROBLEMS / "problems.jsonl", params),
        accuracy=Interval(scores["accuracy"], scores["accuracy_low"], scores["accuracy_high"]),
        pass_at_k={int(k.removeprefix(_PASS)): v for k, v in scores.items() if _PASS in k},
        tags={**_origin(context), **accepted.tags(Path.cwd())},
        source_run_id=_string(_read(layout.TRAIN_RUN), "run_id", layout.TRAIN_RUN),
        params=_answering(params),
        dvc_md5=lineage.lock_digests(layout.DVC_LOCK).get(str(layout.POLICY)),
    )
    if layout.DVC_LOCK.exists():
        context.run.log_text(layout.DVC_LOCK.read_text(), layout.DVC_LOCK.name)
    evaluations.log(
        context.run,
        layout.EVALUATION / results.RESULTS,
        candidate.evaluation,
        pictures=Pictures(picture_directories(Path.cwd())),
        max_pictures=params.registry.evaluation_pictures,
    )
    context.run.set_tags({evaluations.TRAINED_BY_TAG: candidate.source_run_id or ""})
    context.run.set_tags(accepted.tags(Path.cwd()))
    registration = context.run.patiently(
        lambda: registry.register(
            context.run,
            candidate,
            params.registry,
            rule=promotion.Rule(params.registry.min_gain, params.evaluate.bootstrap_samples),
            root=Path.cwd(),
        ),
        params.tracking.outage_s,
    )
    context.run.set_tags({"registered": f"models:/{registration.name}/{registration.version}"})
    context.run.log_artifact(layout.METRICS)
    _log_traces(context)
    write_json(layout.REGISTERED, asdict(registration))
    for page in card_cli.write(Path.cwd(), context.run.store):
        context.run.log_artifact(page)


def _scores(metrics: Mapping[str, object]) -> Mapping[str, float]:
    block: object = metrics
    for key in ("test", "policy", "sampled"):
        block = cast("Mapping[str, object]", block).get(key) if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or "accuracy" not in block:
        raise ValueError(
            f"{layout.METRICS} has no test.policy.sampled.accuracy; run dvc repro evaluate"
        )
    return cast("Mapping[str, float]", block)


def _origin(context: StageContext) -> dict[str, str]:
    """Tags that lead from a version back to what made it."""
    canonical = json.dumps(context.params.model_dump(mode="json"), sort_keys=True)
    parent = context.run.patiently(context.run.parent_tags, context.params.tracking.outage_s)
    found = {
        "params.digest": hashlib.sha256(canonical.encode()).hexdigest(),
        "git.commit": environment.commit(Path.cwd()),
        "dvc.experiment": os.environ.get(_EXPERIMENT) or parent.get("prefect.flow_run_name"),
        "prefect.flow_run_id": parent.get("prefect.flow_run_id"),
        "mlflow.parentRunId": parent and context.run.tags().get("mlflow.parentRunId"),
        "user": parent.get("mlflow.user") or record.user(),
    }
    if layout.DVC_LOCK.exists():
        found["dvc.lock.digest"] = lineage.file_digest(layout.DVC_LOCK)
    return {key: value for key, value in found.items() if value}


def _answering(params: Params) -> dict[str, object]:
    """The params that a policy answers questions under; what the weights came from is no part of them."""
    tree = params.model_dump(mode="json", include={"images", "env", "rollout", "model"})
    return {**tree, "model": {key: tree["model"][key] for key in ("dtype", "attention")}}


def _log_traces(context: StageContext) -> None:
    """The report's trajectories as MLflow traces: a view beside the files, so a failure is only a warning."""
    root = Path.cwd()
    pictures = Pictures(picture_directories(root))
    try:
        traces.log_trajectories(context.run, choose(read_run(root)), pictures.data_uri)
    except tracking.TrackingError as error:
        logger.warning("no traces were logged: %s", error)


def _read(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); run dvc repro to write it anew"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object; run dvc repro to write it anew")
    return cast("Mapping[str, object]", content)


def _string(content: Mapping[str, object], key: str, path: Path) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{path} has no {key!r}; run dvc repro train")
    return value


def _keep_report(page: Path) -> None:
    """Put the page into the stage's MLflow run and, where there is one, the pipeline's."""
    last = json.loads((layout.STATE / "timings.jsonl").read_text().splitlines()[-1])
    tracked = load(layout.PARAMS).tracking
    for run_id in (last["run_id"], os.environ.get(PARENT_RUN)):
        if run_id:
            try:
                attach_run(tracked, root=Path.cwd(), run_id=run_id).log_artifact(page, "report")
            except tracking.TrackingError as error:  # the page itself is there
                logger.warning("run %s has no report: %s", run_id, error)


def main() -> None:
    """Run the stage, then write the report, which shows the stage's own time and outcome too."""
    try:
        run_stage("register", register)
    except SystemExit as ending:
        if not ending.code:
            page = write_report(Path.cwd())
            logger.info("report: %s", page)
            _keep_report(page)
        raise


if __name__ == "__main__":
    main()
