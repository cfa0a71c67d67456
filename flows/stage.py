"""The flow `stage`: one stage on a worker of another pool, asked for by a run of `pipeline`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.deployments import run_deployment
from prefect.states import Cancelling
from prefect.tasks import Task
from pydantic import BaseModel, ConfigDict

from flows import dvc_commands as dvc
from flows import graph
from flows.cancelling import watched
from flows.options import StageOptions
from flows.place import ROOT, Identity, Place, open_worktree
from polyturn import layout, params
from polyturn.pipeline import workspace
from polyturn.tracking.orphans import close_lost
from polyturn.tracking.store import connect
from tasks.context import PARENT_RUN
from tasks.failure import FAILURE, Outcome
from tasks.stage import Result, StageFailedError, StageReport, run_dvc_stage

_HANDOVER = "handover"  # key of the artifact that says what became of the stage
_POLL_S = 2.0


class StageLostError(StageFailedError):
    """The run of a stage elsewhere crashed without a word of the stage's: its worker or its process is gone."""


def _is_lost(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Only then is the stage asked for again: what failed there has been tried again there."""
    return isinstance(state.data, StageLostError)


class StageJob(BaseModel):
    """What a worker elsewhere needs: the commit, the files of git that the run has written, the run it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    run_name: str
    owner: str
    branch: str
    commit: str
    files: dict[str, str]  # params.yaml, dvc.lock, metrics.json, ...: path -> text
    env: dict[str, str]  # for the stage: the MLflow run that it is nested in
    retries: int


class Handover(BaseModel):
    """What comes back: the same files, and the result; data comes by DVC's shared cache or remote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Result | None = None
    exit_code: int = 0
    message: str = ""
    files: dict[str, str] = {}


@flow(name="stage", validate_parameters=True)
def stage(job: StageJob) -> State[None] | None:
    """Work on one stage in a worktree of its own.

    Raises:
        StageFailedError: the stage failed.
    """
    return watched(partial(_work, job))


def _work(job: StageJob) -> None:
    name = f"{job.run_name}-{job.stage}"
    identity = Identity(name, job.owner, job.branch, job.commit)
    with open_worktree(identity, {}, is_head=False) as place:
        for path, text in job.files.items():
            (place.root / path).write_text(text)
        dvc.bring(place.root, dvc.inputs(place.root, job.stage))
        try:
            report = run_dvc_stage.with_options(retries=job.retries)(job.stage, place.root, job.env)
        except StageFailedError as error:
            _hand_over(Handover(exit_code=error.outcome.exit_code, message=error.outcome.message))
            raise
        if dvc.default_remote(place.root):
            dvc.run(place.root, "push", job.stage)
        _hand_over(Handover(result=report.result, files=git_files(place.root)))
        root = place.root
    workspace.remove(ROOT, root)


def git_files(root: Path) -> dict[str, str]:
    """The files of git that a run writes: path -> text, those that are there."""
    paths = [str(layout.PARAMS), str(layout.DVC_LOCK), *dvc.plain_outs(root)]
    return {path: (root / path).read_text() for path in paths if (root / path).is_file()}


@task(
    name="stage-elsewhere",
    task_run_name="{stage_name} on {options.pool}",
    cache_policy=NO_CACHE,
    retry_delay_seconds=2,
    retry_condition_fn=_is_lost,
)
def run_elsewhere(
    stage_name: str, place: Place, options: StageOptions, env: Mapping[str, str]
) -> StageReport:
    """Have a worker of `options.pool` bring the stage up to date, and bring its outs here.

    Cancelling this run cancels that one. A stage whose worker is lost is asked for again `options.retries` times; it goes
    on where its checkpoints are (train.work_uri).

    Raises:
        StageFailedError: the stage failed there, or its run ended otherwise than well.
        DvcError: its outs do not get here.
    """
    started = time.monotonic()
    if not graph.is_stale(place.root, stage_name):
        return StageReport(stage_name, "unchanged", time.monotonic() - started)
    identity = place.identity
    job = StageJob(
        stage=stage_name,
        run_name=identity.name,
        owner=identity.owner,
        branch=identity.branch,
        commit=identity.commit,
        files=git_files(place.root),
        env=dict(env),
        retries=options.retries,
    )
    with get_client(sync_client=True) as client:
        run = _ask(job, options)
        try:
            handover = _wait(client, run, stage_name)
        except StageLostError:
            _close_mlflow_run(place.root, job)
            raise
    for path, text in handover.files.items():
        (place.root / path).write_text(text)
    dvc.bring(place.root, dvc.cached_outs(place.root, stage_name))
    return StageReport(stage_name, handover.result or "ran", time.monotonic() - started)


def _close_mlflow_run(root: Path, job: StageJob) -> None:
    """The stage's run in MLflow, which its process could not close any more."""
    if parent := job.env.get(PARENT_RUN):
        store = connect(params.load(root / layout.PARAMS).tracking, root)
        close_lost(store, parent, job.stage, "its worker is gone")


def _ask(job: StageJob, options: StageOptions) -> FlowRun:
    asked = run_deployment(
        f"stage/{options.pool}",
        parameters={"job": job.model_dump()},
        flow_run_name=f"{job.run_name}-{job.stage}",
        tags=[f"owner:{job.owner}", f"branch:{job.branch}", f"stage:{job.stage}"],
        work_queue_name=options.queue,
        timeout=0,
    )
    run = cast("FlowRun", asked)  # a coroutine only where it is called from one
    get_run_logger().info("stage %s goes to pool %s as %s", job.stage, options.pool, run.name)
    return run


def _wait(client: SyncPrefectClient, run: FlowRun, stage_name: str) -> Handover:
    try:
        state = None
        while state is None or not state.is_final():
            time.sleep(_POLL_S)
            state = client.read_flow_run(run.id).state
    except BaseException:
        client.set_flow_run_state(run.id, Cancelling(message="the pipeline's run has ended"))
        raise
    handover = _handed_over(client, run)
    if handover is None:
        outcome = Outcome(FAILURE, f"its run {run.name} is {state.name}: {state.message}")
        raise (StageLostError if state.is_crashed() else StageFailedError)(stage_name, outcome)
    if not state.is_completed() or handover.exit_code:
        raise StageFailedError(stage_name, Outcome(handover.exit_code or FAILURE, handover.message))
    return handover


def _hand_over(handover: Handover) -> None:
    create_table_artifact(
        [{"what": key, "value": json.dumps(value)} for key, value in handover.model_dump().items()],
        key=_HANDOVER,
        description="What goes back to the run that asked for the stage",
    )


def _handed_over(client: SyncPrefectClient, run: FlowRun) -> Handover | None:
    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), key=ArtifactFilterKey(any_=[_HANDOVER])
        )
    )  # fmt: skip
    if not found:
        return None
    rows = cast("Sequence[Mapping[str, str]]", json.loads(str(found[-1].data)))
    return Handover.model_validate({row["what"]: json.loads(row["value"]) for row in rows})
