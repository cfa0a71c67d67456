"""The flow `pipeline`: walks the graph of dvc.yaml, one Prefect task per stage; reuse is DVC's."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import cast
from uuid import UUID

import httpx
from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from pydantic import JsonValue

from flows import artifacts, events, graph, options, publish, summary
from flows.cancelling import watched
from flows.options import StageOptions, StagesError
from flows.place import ROOT, Identity, Place, identify, open_worktree
from flows.stage import run_elsewhere
from polyturn import layout, params, tracking
from polyturn.login import USER
from polyturn.pipeline import workspace
from polyturn.report.write import write_report
from polyturn.supported import check_supported
from tasks.context import PARENT_RUN, imports_are_done
from tasks.failure import FAILURE, TERMINATED, USER_ERROR, Terminated
from tasks.stage import StageFailedError, StageReport, run_dvc_stage

_SERVER_S = 5.0


@flow(name="pipeline", validate_parameters=True)
def pipeline(
    recipe: str | None = None,
    overrides: dict[str, JsonValue] | None = None,
    revision: str | None = None,
    owner: str | None = None,
    in_worktree: bool = True,
    stages: dict[str, StageOptions] | None = None,
) -> dict[str, str] | State[dict[str, str]]:
    """Run all stages of dvc.yaml that are not up to date; return what became of each.

    Args:
        recipe: an overlay of recipes/, by name.
        overrides: dotted params keys, laid over recipe and params.yaml, e.g. {"train.steps": 3}.
        revision: a branch, tag or commit; none: the current commit of the checkout that the worker works for.
        owner: whose run it is; none: the worker's user.
        in_worktree: work in a git worktree of its own; else in this checkout, where recipe and overrides are written
            into params.yaml.
        stages: work pool, queue and retries by stage, e.g. {"train": {"pool": "polyturn-gpu", "retries": 3}}.

    Raises:
        ParamsError: recipe or overrides are wrong; nothing has been touched.
        StagesError: `stages` is.
        WorkspaceError: a worktree is asked for beside uncommitted edits, or the revision is unknown.
        StageFailedError: a stage failed; finished stages are kept.
    """
    plan = _plan(recipe, overrides or {})
    chosen = _check_stages(stages or {}, in_worktree=in_worktree)
    identity = identify(revision, owner)
    opened = (
        open_worktree(identity, plan.changes, is_head=revision is None)
        if in_worktree
        else _open_checkout(identity, plan.changes)
    )
    return watched(partial(_work, opened, chosen))


def _work(
    opened: AbstractContextManager[Place], chosen: Mapping[str, StageOptions]
) -> dict[str, str]:
    with opened as place:
        reports = _run_stages(place, chosen)
    if place.is_worktree:
        workspace.remove(ROOT, place.root)
    return {r.stage: r.result for r in reports}


def _plan(recipe: str | None, overrides: Mapping[str, JsonValue]) -> workspace.Plan:
    plan = workspace.compose(ROOT, recipe=recipe, overrides=overrides)
    check_supported(plan.params)
    return plan


def _check_stages(
    stages: Mapping[str, StageOptions], *, in_worktree: bool
) -> Mapping[str, StageOptions]:
    options.check(stages, graph.order(ROOT))
    sent = [name for name, chosen in stages.items() if chosen.pool]
    if sent and not in_worktree:
        raise StagesError(
            f"stages.{sent[0]}.pool: another worker works from a commit, and in_worktree: false works on the files of "
            "this checkout; set in_worktree, or leave the pool out"
        )
    return stages


@contextlib.contextmanager
def _open_checkout(identity: Identity, changes: Mapping[str, object]) -> Iterator[Place]:
    if changes:
        workspace.write_params(ROOT, changes)
        get_run_logger().info("params.yaml now holds the recipe or overrides (see `git diff`)")
    yield Place(ROOT, identity, is_worktree=False)


def _run_stages(place: Place, chosen: Mapping[str, StageOptions]) -> list[StageReport]:
    found = graph.read(place.root)
    artifacts.show_plan(found)
    env = {USER: place.identity.owner}
    own_pool = _own_pool() if chosen else None
    reports: list[StageReport] = []
    with _parent_run(place, is_needed=bool(found.waiting), env=env) as run:
        for stage in (planned.name for planned in found.stages):
            if not found.waiting:  # to ask dvc once more for each stage takes seconds
                reports.append(StageReport(stage, "unchanged", 0.0))
                continue
            report = _run_stage(stage, place, chosen.get(stage, options.DEFAULT), env, own_pool)
            reports.append(report)
            _tell(place, report)
        if run is not None:
            run.log_artifact(place.root / layout.DVC_LOCK)
            # Pipelines compare without their stages' runs.
            run.log_metrics(summary.scores(place.root))
        _finish(place, reports, run)
    return reports


def _run_stage(
    stage: str, place: Place, chosen: StageOptions, env: Mapping[str, str], own_pool: str | None
) -> StageReport:
    if chosen.pool and chosen.pool != own_pool:
        return run_elsewhere.with_options(retries=chosen.retries)(stage, place, chosen, env)
    return run_dvc_stage.with_options(retries=chosen.retries)(stage, place.root, env)


def _tell(place: Place, report: StageReport) -> None:
    """Show and announce what a stage has brought, as soon as it is there."""
    if report.stage == "train":
        artifacts.show_curve(place.root / layout.CURVE)
    if report.stage == "register" and report.result == "ran":
        record = json.loads((place.root / layout.REGISTERED).read_text())
        if record["alias"] == "champion":
            events.promoted(name=record["name"], version=record["version"], alias=record["alias"])


@contextlib.contextmanager
def _parent_run(
    place: Place, *, is_needed: bool, env: dict[str, str]
) -> Iterator[tracking.Run | None]:
    """The MLflow run that the stages' runs are nested in; none where no stage is stale."""
    if not is_needed:
        yield None
        return
    identity = place.identity
    loaded = params.load(place.root / layout.PARAMS)  # of the run's commit, not of this checkout
    with (
        _as_prefect_says_it(),
        tracking.open_run(
            loaded.tracking, root=place.root, name=identity.name, tags=identity.mlflow_tags
        ) as run,
        _as_a_process_says_it(),
    ):
        run.log_params(loaded)
        artifacts.show_mlflow(run.url)
        env[PARENT_RUN] = run.run_id
        yield run


@contextlib.contextmanager
def _as_a_process_says_it() -> Iterator[None]:
    """Prefect's word for SIGTERM, which a cancelled run gets, becomes the exit that MLflow's run ends by: KILLED."""
    try:
        yield
    except TerminationSignal as signal:
        raise Terminated from signal


@contextlib.contextmanager
def _as_prefect_says_it() -> Iterator[None]:
    """And back, since only by its own word Prefect calls the run cancelled or crashed."""
    try:
        yield
    except Terminated as ending:
        raise ending.__cause__ or ending from None


def _finish(place: Place, reports: list[StageReport], run: tracking.Run | None) -> None:
    """Write the report and show the tables; a worktree's results leave it."""
    page = write_report(place.root)
    rows = summary.read(place.root)
    if place.is_worktree:
        kept = publish.copy_out(place)
        page = kept / layout.REPORT.name
        rows.append(summary.Row("experiment", publish.publish(place, run.url if run else None)))
    rows.append(summary.Row("report", str(page.relative_to(ROOT))))
    artifacts.show_stages(reports, rows)
    get_run_logger().info("finished\n%s", summary.text_table(rows))


def _own_pool() -> str | None:
    """The work pool that this flow run came from; None for one that was started by hand."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run.get_id())).work_pool_name


def _check_server() -> None:
    """Fail early where a Prefect server is named and does not answer; none named: a temporary one starts."""
    url = get_current_settings().api.url
    if url is None:
        return
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=_SERVER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"PREFECT_API_URL: the Prefect server at {url} does not answer ({error}); start it, or run "
            "`make services-stop` to forget the one of `make services`"
        ) from None
    if not answer.is_success:
        raise ValueError(
            f"PREFECT_API_URL: {url} answers {answer.status_code}; the address of a Prefect server's API ends in /api"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the flow from the command line; exit 2 for what the user has to mend."""
    imports_are_done()
    parser = argparse.ArgumentParser(prog="python -m flows.pipeline", description=__doc__)
    parser.add_argument("--recipe", help="an overlay of recipes/, by name")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="pairs")
    parser.add_argument("--worktree", action="store_true", help="in a git worktree of its own")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    try:
        overrides = cast("dict[str, JsonValue]", workspace.parse_pairs(chosen.pairs))
        _plan(chosen.recipe, overrides)
        workspace.require_repository(ROOT)
        if chosen.worktree:  # the flow looks as well, but after its server's start
            workspace.require_committed(ROOT)
        _check_server()
        pipeline(recipe=chosen.recipe, overrides=overrides, in_worktree=chosen.worktree)
    except CancelledRun:
        sys.stderr.write("cancelled\n")
        return TERMINATED
    except StageFailedError as error:
        return FAILURE if error.outcome.is_retryable else USER_ERROR
    except ValueError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    code = main()
    gc.freeze()  # as at the end of a stage
    sys.exit(code)
