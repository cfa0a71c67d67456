"""Stage register: the published policy with its evaluation -> a version in the MLflow registry, and the report."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from polyturn import evaluation_set, layout, results, tracking
from polyturn.params import Params
from polyturn.pictures import Pictures
from polyturn.report.data import picture_directories, read_run
from polyturn.report.page import choose
from polyturn.report.write import write_report
from polyturn.statistics import Interval
from polyturn.tracking import environment, evaluations, lineage, promotion, registry, traces
from tasks.context import StageContext, run_stage, write_json

logger = logging.getLogger(__name__)

_PASS = "pass@"


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
        tags=_origin(params),
        source_run_id=_string(_read(layout.TRAIN_RUN), "run_id", layout.TRAIN_RUN),
    )
    if layout.DVC_LOCK.exists():
        context.run.log_artifact(layout.DVC_LOCK)
    evaluations.log(
        context.run,
        layout.EVALUATION / results.RESULTS,
        candidate.evaluation,
        pictures=Pictures(picture_directories(Path.cwd())),
        max_pictures=params.registry.evaluation_pictures,
    )
    context.run.set_tags({evaluations.TRAINED_BY_TAG: candidate.source_run_id or ""})
    registration = registry.register(
        context.run,
        candidate,
        params.registry,
        rule=promotion.Rule(params.registry.min_gain, params.evaluate.bootstrap_samples),
        root=Path.cwd(),
    )
    context.run.set_tags({"registered": f"models:/{registration.name}/{registration.version}"})
    context.run.log_artifact(layout.METRICS)
    _log_traces(context)
    write_json(layout.REGISTERED, asdict(registration))


def _scores(metrics: Mapping[str, object]) -> Mapping[str, float]:
    block: object = metrics
    for key in ("test", "policy", "sampled"):
        block = cast("Mapping[str, object]", block).get(key) if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or "accuracy" not in block:
        raise ValueError(
            f"{layout.METRICS} has no test.policy.sampled.accuracy; run dvc repro evaluate"
        )
    return cast("Mapping[str, float]", block)


def _origin(params: Params) -> dict[str, str]:
    canonical = json.dumps(params.model_dump(mode="json"), sort_keys=True)
    tags = {"params.digest": hashlib.sha256(canonical.encode()).hexdigest()}
    if commit := environment.commit(Path.cwd()):
        tags["git.commit"] = commit
    if layout.DVC_LOCK.exists():
        tags["dvc.lock.digest"] = lineage.file_digest(layout.DVC_LOCK)
    return tags


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


def main() -> None:
    """Run the stage, then write the report, which shows the stage's own time and outcome too."""
    try:
        run_stage("register", register)
    except SystemExit as ending:
        if not ending.code:
            logger.info("report: %s", write_report(Path.cwd()))
        raise


if __name__ == "__main__":
    main()
