"""Flows without a server: deployments against the code, options of stages, what is shown and how it is called."""

from __future__ import annotations

import base64
import importlib
import json
import math
import threading
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError

from flows import artifacts, automations, events, graph, options, pipeline, place, summary
from flows.evaluate import EvaluationRequest
from flows.options import StageOptions, StagesError
from flows.stage import Handover, StageJob
from polyturn.cli import commands as cli
from polyturn.pipeline import workspace
from polyturn.pipeline.plan import Plan, StagePlan
from polyturn.pipeline.plan_reasons import Reason
from scripts import work_pools
from tasks.stage import Result, StageReport

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())[
    "deployments"
]
ORDER = ("fetch", "train", "evaluate")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{d['entrypoint']}/{d['name']}")
def test_a_deployment_names_a_flow_a_pool_and_parameters_that_there_are(
    deployment: dict[str, Any],
) -> None:
    file, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    given = deployment.get("parameters", {})
    if flow.name != "stage":
        flow.validate_parameters(given)
    assert deployment["work_pool"]["name"] in {pool.name for pool in work_pools.POOLS}
    assert all(not schedule["active"] for schedule in deployment.get("schedules", ()))
    if "recipe" in given:
        workspace.compose(ROOT, recipe=given["recipe"], overrides={})
    chosen = {stage: StageOptions(**one) for stage, one in given.get("stages", {}).items()}
    options.check(chosen, graph.order(ROOT))
    stages = {d["name"] for d in DEPLOYMENTS if d["entrypoint"] == "flows/stage.py:stage"}
    assert {one.pool for one in chosen.values()} <= stages


def test_every_pool_has_the_deployment_that_stages_are_sent_to() -> None:
    sent = {d["name"]: d["work_pool"]["name"] for d in DEPLOYMENTS if d["entrypoint"] == "flows/stage.py:stage"}  # fmt: skip
    assert sent == {pool.name: pool.name for pool in work_pools.POOLS}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"trian": {}}, r"'trian' is no stage of dvc.yaml; known: fetch, train, evaluate"),
        ({"train": {"queue": "urgent"}}, r"stages.train: queue 'urgent' needs the pool"),
    ],
)
def test_wrong_options_of_stages_are_named(stages: dict[str, dict[str, str]], message: str) -> None:
    with pytest.raises(StagesError, match=message):
        options.check({name: StageOptions.model_validate(o) for name, o in stages.items()}, ORDER)


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"retries": 11}, {"pool": "a/b"}, {"gpu": 1}])
def test_options_of_a_stage_are_bounded(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StageOptions.model_validate(wrong)


def test_run_names_become_names_of_directories_and_references() -> None:
    given = ("polite-otter", "lr 1e-5 / again", "..", "-rf", "a..b", "ä")
    assert [place.file_name(name) for name in given] == [
        "polite-otter", "lr-1e-5-again", "run", "rf", "a-b", "run",
    ]  # fmt: skip


def test_a_long_run_name_is_a_short_file_name_of_its_own() -> None:
    """A name made of all its params: longer than a file's may be, and like another's at its beginning."""
    first, second = (place.file_name(f"{'lr-1e-5-' * 60}{end}") for end in "ab")
    assert first != second
    assert len(first) == len(second) == 100


def test_the_address_of_the_servers_api_is_told_from_that_of_its_page() -> None:
    """PrefectHQ/prefect-helm#171: /api was missing; and one with a slash at its end is right."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = f"http://127.0.0.1:{server.server_address[1]}"
        for address, said in (
            (f"{page}/api", None),
            (f"{page}/api/", None),
            (page, "answers 404; the address of a Prefect server's API ends in /api"),
            (page.removeprefix("http://"), "does not answer"),
        ):
            expected = pytest.raises(ValueError, match=said) if said else nullcontext()
            with temporary_settings({PREFECT_API_URL: address}), expected:
                pipeline._check_server()
        server.shutdown()


def test_the_curve_is_a_picture_of_the_steps_that_have_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("step,reward_mean\n0,0.25\n1,0.5\n2,\n")
    assert artifacts._rewards(path) == [0.25, 0.5]
    kind, _, data = artifacts.picture([0.25, math.nan, 0.5]).partition(",")
    assert kind == "data:image/svg+xml;base64"
    root = ET.fromstring(base64.b64decode(data))
    lines = [node for node in root.iter() if node.get("class") == "line a"]
    assert len(lines) == 1


def test_links_of_mlflow_take_the_browsers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://mlflow:5000/#/experiments/1/runs/abc"
    assert artifacts.browsable(url) == url
    monkeypatch.setenv(artifacts.PAGE_VARIABLE, "https://ml.example.org/")
    assert artifacts.browsable(url) == "https://ml.example.org/#/experiments/1/runs/abc"


def test_the_plan_says_why_how_long_and_for_how_much() -> None:
    reasons = [Reason("code", f"polyturn/{n}/__init__.py", "+1 -1") for n in range(6)]
    plan = Plan(
        [
            StagePlan("fetch", "up to date", (), 3.0, None),
            StagePlan("train", "runs", reasons, 90.0, 0.1),
            StagePlan("evaluate", "may run", (), None, None),
        ]
    )
    table = summary.plan_table(plan).splitlines()
    assert table[2] == "| fetch | up to date | 3.0 s |  |"
    assert table[3].startswith("| train | runs | 90.0 s, 0.10 | code `polyturn/0/__init__.py` +1 -1<br>")  # fmt: skip
    assert table[3].endswith("<br>and 2 more |")
    assert table[4] == "| evaluate | may run |  |  |"
    assert table[-1] == "As in the last runs: 90.0 s."


def test_a_pipeline_has_the_scores_of_its_evaluation_in_its_own_run(tmp_path: Path) -> None:
    """Under the names of the evaluation's run: a table of pipelines can be sorted by accuracy without their stages."""
    assert summary.scores(tmp_path) == {}, "an evaluation is no stage of it, or failed"
    blocks = {"policy": {"sampled": {"accuracy": 0.9}, "greedy": {"accuracy": 1.0, "pass@1": 1.0}}}
    (tmp_path / "metrics.json").write_text(json.dumps({"test": {"num_problems": 8, **blocks}}))
    assert summary.scores(tmp_path) == {
        "test/policy/sampled/accuracy": 0.9,
        "test/policy/greedy/accuracy": 1.0,
        "test/policy/greedy/pass@1": 1.0,
    }


def test_what_travels_between_workers_survives_json() -> None:
    job = StageJob(stage="train", run_name="a", owner="o", branch="b", commit="c", files={"dvc.lock": "é\n"}, env={}, retries=1)  # fmt: skip
    assert StageJob.model_validate_json(job.model_dump_json()) == job
    handover = Handover(result="ran", files={"metrics.json": "{}"})
    assert Handover.model_validate(handover.model_dump()) == handover


@pytest.mark.parametrize(
    "request_", [EvaluationRequest(), EvaluationRequest(split="validation", num=4, greedy=True, ablate_images=True)]
)  # fmt: skip
def test_an_evaluation_is_asked_for_as_the_command_line_takes_it(
    request_: EvaluationRequest,
) -> None:
    chosen = cli.build_parser().parse_args(["evaluate", *request_.arguments("champion")])
    assert (str(chosen.policy), chosen.split, chosen.num) == ("champion", request_.split, request_.num)  # fmt: skip
    assert (chosen.greedy, chosen.ablate_images) == (request_.greedy, request_.ablate_images)


@pytest.mark.parametrize(
    ("alias", "result", "is_told"),
    [("champion", "ran", True), ("challenger", "ran", False), ("champion", "unchanged", False)],
)
def test_a_new_champion_is_announced_by_the_run_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str, result: Result, is_told: bool
) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(pipeline.events, "promoted", lambda **event: told.append(event))
    record = {"name": "polyturn-geo3k", "version": 7, "alias": alias, "reason": ""}
    (tmp_path / "registered.json").write_text(json.dumps(record))
    where = place.Place(tmp_path, place.Identity("a", "o", "b", "c"), is_worktree=True)
    pipeline._tell(where, StageReport("register", result, 1.0))
    expected = [{"name": "polyturn-geo3k", "version": 7, "alias": "champion"}]
    assert told == (expected if is_told else [])


def test_promotions_are_told_under_the_name_that_automations_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others subscribe to it by its text, so that it stays whatever becomes of our modules."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        events,
        "emit_event",
        lambda event, *, resource, payload: told.append((event, resource["prefect.resource.id"])),
    )
    events.promoted(name="tiny", version=2, alias="champion")
    assert told == [("polyturn.model.promoted", "polyturn.model.tiny")]


def test_silence_is_longer_than_a_few_heartbeats_and_every_end_breaks_it() -> None:
    automation = automations.crash_the_silent()
    trigger: Any = automation.trigger
    assert trigger.within.total_seconds() >= 3 * automations.HEARTBEAT_S
    assert {"prefect.flow-run.Completed", "prefect.flow-run.heartbeat"} <= trigger.expect
    assert trigger.after == {"prefect.flow-run.heartbeat"}
