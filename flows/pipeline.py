"""The flow `pipeline`: walks the graph of dvc.yaml, one Prefect task per stage; reuse is DVC's."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
from prefect import flow, get_run_logger
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from pydantic import JsonValue

from flows import graph, summary
from polyturn import layout, tracking, workspace
from polyturn.report.write import write_report
from polyturn.supported import check_supported
from tasks.context import PARENT_RUN
from tasks.failure import FAILURE, USER_ERROR
from tasks.stage import StageFailedError, StageReport, run_dvc_stage

ROOT = Path(__file__).resolve().parent.parent
_SERVER_S = 5.0
_KEPT = (layout.PARAMS, layout.DVC_LOCK, layout.METRICS, layout.REGISTERED, layout.REPORT)


@dataclass(frozen=True)
class Place:
    """The checkout that a flow run works in, and what it is called everywhere."""

    root: Path
    name: str
    is_worktree: bool


@flow(name="pipeline", validate_parameters=True)
def pipeline(
    recipe: str | None = None,
    overrides: dict[str, JsonValue] | None = None,
    in_worktree: bool = True,
) -> dict[str, str]:
    """Run all stages of dvc.yaml that are not up to date; return what became of each.

    Args:
        recipe: an overlay of recipes/, by name.
        overrides: dotted params keys, laid over recipe and params.yaml, e.g. {"train.steps": 3}.
        in_worktree: work in a git worktree of its own (the current commit); else in this checkout,
            where recipe and overrides are written into params.yaml.

    Raises:
        ParamsError: recipe or overrides are wrong; nothing has been touched.
        WorkspaceError: a worktree is asked for beside uncommitted edits.
        StageFailedError: a stage failed; finished stages are kept.
    """
    plan = _plan(recipe, overrides or {})
    place = _make_place(plan.changes, in_worktree=in_worktree)
    pipeline_graph = graph.read(place.root)
    create_markdown_artifact(
        summary.plan_table(pipeline_graph.order, pipeline_graph.stale), key="plan"
    )
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    reports: list[StageReport] = []
    with _parent_run(place, plan, is_needed=bool(pipeline_graph.stale), env=env) as run:
        for stage in pipeline_graph.order:
            reports.append(run_dvc_stage(stage, place.root, env))
        if run is not None:
            run.log_artifact(place.root / layout.DVC_LOCK)
            create_link_artifact(run.url, link_text="MLflow run", key="mlflow-run")
    _finish(place, reports)
    return {r.stage: r.result for r in reports}


def _plan(recipe: str | None, overrides: Mapping[str, JsonValue]) -> workspace.Plan:
    plan = workspace.compose(ROOT, recipe=recipe, overrides=overrides)
    check_supported(plan.params)
    return plan


def _make_place(changes: Mapping[str, object], *, in_worktree: bool) -> Place:
    name = str(flow_run.get_name())
    if in_worktree:
        return Place(workspace.create(ROOT, name, changes), name, is_worktree=True)
    if changes:
        workspace.write_params(ROOT, changes)
        get_run_logger().info("params.yaml now holds the recipe or overrides (see `git diff`)")
    return Place(ROOT, name, is_worktree=False)


@contextlib.contextmanager
def _parent_run(
    place: Place, plan: workspace.Plan, *, is_needed: bool, env: dict[str, str]
) -> Iterator[tracking.Run | None]:
    """The MLflow run that the stages' runs are nested in; none where no stage is stale."""
    if not is_needed:
        yield None
        return
    tags = {"prefect.flow_run_id": str(flow_run.get_id()), "prefect.flow_run_name": place.name}
    with tracking.open_run(
        plan.params.tracking, root=place.root, name=place.name, tags=tags
    ) as run:
        run.log_params(plan.params)
        env[PARENT_RUN] = run.run_id
        yield run


def _finish(place: Place, reports: list[StageReport]) -> None:
    """Write the report and show the tables; a worktree's results are copied out before it is removed."""
    write_report(place.root)
    page = place.root / layout.REPORT
    rows = summary.read(place.root)
    if place.is_worktree:
        kept = ROOT / "runs" / place.name
        kept.mkdir(parents=True, exist_ok=True)
        for path in (place.root / name for name in _KEPT):
            if path.is_file():
                shutil.copy(path, kept)
        page = kept / layout.REPORT.name
        workspace.remove(ROOT, place.root)
    rows.append(summary.Row("report", str(page.relative_to(ROOT))))
    stages = summary.stage_table(reports)
    results = "\n".join(f"- {row.what}: {row.value}" for row in rows)
    create_markdown_artifact(f"{stages}\n\n{results}", key="stages")
    get_run_logger().info("finished\n%s", summary.text_table(rows))


def _check_server() -> None:
    """Fail early where a Prefect server is named and does not answer; none named: a temporary one starts."""
    url = get_current_settings().api.url
    if url is None:
        return
    try:
        httpx.get(f"{url}/health", timeout=_SERVER_S).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(
            f"PREFECT_API_URL: the Prefect server at {url} does not answer ({error}); start it, or run "
            "`make services-stop` to forget the one of `make services`"
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Run the flow from the command line; exit 2 for what the user has to mend."""
    parser = argparse.ArgumentParser(prog="python -m flows.pipeline", description=__doc__)
    parser.add_argument("--recipe", help="an overlay of recipes/, by name")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="pairs")
    parser.add_argument("--worktree", action="store_true", help="in a git worktree of its own")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    try:
        overrides = cast("dict[str, JsonValue]", workspace.parse_pairs(chosen.pairs))
        _plan(chosen.recipe, overrides)
        _check_server()
        pipeline(recipe=chosen.recipe, overrides=overrides, in_worktree=chosen.worktree)
    except StageFailedError as error:
        return FAILURE if error.outcome.is_retryable else USER_ERROR
    except ValueError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
