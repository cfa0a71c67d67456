"""Two users, two workers, one set of services: runs at once, ended by stop, cancel and death, and gone on with.

The tests run in order and build on each other's runs, since each run of all stages takes a minute or two.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from polyturn import layout
from polyturn.pipeline import workspace
from scripts import work_pools
from tests.e2e_team import team as teams
from tests.e2e_team.conftest import Inbox
from tests.e2e_team.services import Service, answers
from tests.e2e_team.team import FlowRun, Team
from tests.ports import free_ports
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=8)
OVERRIDES: Mapping[str, Mapping[str, object]] = {
    "alice": {"seed": 1},
    "bob": {"seed": 2, "learner.lr": 1e-5},
}
ARTIFACTS = {"plan", "stages", "reward-curve", "mlflow-run", "progress-train"}
LONG = {"train.steps": 200, "learner.decay_steps": 200, "train.eval_every": 100}


@pytest.fixture(scope="module")
def told(team: Team, alice: ToyProject, inbox: Inbox) -> Inbox:
    """The inbox, to which the server sends notifications."""
    done = alice.run(sys.executable, "scripts/notifications.py", inbox.url, **team.env)
    assert done.returncode == 0, done.stdout
    return inbox


@pytest.fixture(scope="module")
def first_runs(team: Team, alice: ToyProject, bob: ToyProject, told: Inbox) -> dict[str, FlowRun]:
    """A run of each user at the same time; alice asks by the command line."""
    run = ("prefect", "deployment", "run", "pipeline/cpu-demo", "--flow-run-name", "alice-1")
    overrides = json.dumps(OVERRIDES["alice"])
    asked = alice.run(*run, "-p", "owner=alice", "-p", f"overrides={overrides}", **team.env)
    assert asked.returncode == 0, asked.stdout
    wanted = {"flow_runs": {"name": {"any_": ["alice-1"]}}}
    ids = {"alice": team.api("flow_runs/filter", wanted)[0]["id"]}
    ids["bob"] = team.submit("pipeline/cpu-demo", "bob-1", owner="bob", overrides=OVERRIDES["bob"])
    ended = {owner: team.wait(run_id) for owner, run_id in ids.items()}
    for found in ended.values():
        assert found.state == "COMPLETED", team.logs(found.id)
    return ended


# Server and pools: no run of stages -------------------------------------------------------------------------------


def test_one_run_at_a_time_on_the_gpu_and_urgent_ones_first(team: Team, alice: ToyProject) -> None:
    """What a worker of the pool would be given: of two that wait in `default` and one in `urgent`, the urgent one."""
    job = {"stage": "x", "run_name": "x", "owner": "", "branch": "", "commit": "", "files": {}, "env": {}, "retries": 0}  # fmt: skip
    deployment = team.api(f"deployments/name/stage/{work_pools.GPU}")["id"]
    ids: dict[str, str] = {}
    for name, queue in (("first", "default"), ("second", "default"), ("urgent", "urgent")):
        body = {
            "name": name,
            "parameters": {"job": job},
            "work_queue_name": queue,
            "state": {"type": "SCHEDULED"},
        }
        ids[name] = team.api(f"deployments/{deployment}/create_flow_run", body)["id"]

    def offered() -> list[str]:
        found = team.api(f"work_pools/{work_pools.GPU}/get_scheduled_flow_runs", {"limit": 10})
        return [item["flow_run"]["name"] for item in found]

    assert offered()[0] == "urgent"
    pending = {"state": {"type": "PENDING"}, "force": True}
    team.api(f"flow_runs/{ids['urgent']}/set_state", pending)
    assert offered() == [], "one is being worked on, and the limit is one"
    for run_id in ids.values():
        team.api(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_server_takes_templates_and_deployments_of_other_pools(
    team: Team, alice: ToyProject, kind: str
) -> None:
    pool, file = f"polyturn-{kind}", f"docker/work_pools/{kind}.json"
    make = ("prefect", "work-pool", "create", pool, "--type", kind, "--base-job-template", file)
    made = alice.run(*make, **team.env)
    assert made.returncode == 0, made.stdout
    if kind == "kubernetes":
        return
    done = alice.run("prefect", "--no-prompt", "deploy", "-n", "pipeline/cpu-demo", "--pool", pool, **team.env)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert team.api("deployments/name/pipeline/cpu-demo")["work_pool_name"] == pool
    back = alice.run("prefect", "--no-prompt", "deploy", "-n", "pipeline/cpu-demo", **team.env)
    assert back.returncode == 0, back.stdout


def test_schedules_are_examples_and_inactive(team: Team, alice: ToyProject) -> None:
    names = ("pipeline/cpu-demo", "pipeline/geo3k-gpu", "evaluate/champion", "compare/versions")
    for name in names:
        (schedule,) = team.api(f"deployments/name/{name}")["schedules"]
        assert schedule["active"] is False


def test_the_health_check_notices_a_refused_host_and_a_missing_login(
    team: Team, tmp_path: Path
) -> None:
    """docker/healthy.py against real servers, with the options of docker/compose.yaml."""

    def healthy(url: str, host: str, **env: str) -> bool:
        command = [sys.executable, "docker/healthy.py", f"{url}/api/2.0/mlflow/experiments/search", host, '{"max_results": 1}']  # fmt: skip
        return subprocess.run(command, cwd=team.source, env=env, check=False).returncode == 0

    host = team.mlflow_url.removeprefix("http://")
    assert healthy(team.mlflow_url, host)
    assert answers(f"{team.mlflow_url}/health")
    assert not healthy(team.mlflow_url, "mlflow:5000")

    (port,) = free_ports(1)
    url, login = f"http://127.0.0.1:{port}", {"admin_username": "ada", "admin_password": "a-long-password"}  # fmt: skip
    ini = tmp_path / "auth.ini"
    values = {"default_permission": "READ", "database_uri": f"sqlite:///{tmp_path}/auth.db", **login}  # fmt: skip
    ini.write_text("[mlflow]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()))
    command = [
        sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--allowed-hosts", f"127.0.0.1:{port}",
    ]  # fmt: skip
    env = {"MLFLOW_AUTH_CONFIG_PATH": str(ini), "MLFLOW_FLASK_SERVER_SECRET_KEY": "word"}
    server = Service("auth", command, tmp_path / "auth.log", lambda: answers(f"{url}/health"), env=env, cwd=tmp_path)  # fmt: skip
    server.start()
    try:
        user, password = login.values()
        known = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
        wait_until(lambda: healthy(url, f"127.0.0.1:{port}", **known), seconds=240)  # slow at first
        assert not healthy(url, f"127.0.0.1:{port}")
    finally:
        server.stop()


# Runs ---------------------------------------------------------------------------------------------------------------


def test_wrong_parameters_fail_in_one_line_before_anything_runs(
    team: Team, alice: ToyProject, told: Inbox
) -> None:
    """A key that there is not, a stage that there is not; told once, not tried again."""
    wrong = {
        "key": ({"overrides": {"train.lr": 1e-5}}, "train.lr is not a key of polyturn"),
        "stage": ({"stages": {"trian": {"retries": 2}}}, "stages: 'trian' is no stage of dvc.yaml"),
    }
    for name, (parameters, message) in wrong.items():
        run = team.wait(team.submit("pipeline/cpu-demo", f"wrong-{name}", **parameters))
        assert run.state == "FAILED"
        assert message in run.message
        assert "\n" not in run.message
        log = team.logs(run.id)
        assert "Traceback" not in log
        assert "Running stage" not in log
        assert team.mlflow_runs(run.name) == {}
    assert not list((alice.path / ".polyturn/worktrees").glob("*"))
    mail = told.wait_for("wrong-key")
    assert mail["subject"] == "polyturn: wrong-key Failed"
    assert wrong["key"][1] in mail["body"]
    assert "/runs/flow-run/" in mail["body"].splitlines()[-1]


def test_two_users_runs_at_the_same_time_are_called_the_same_everywhere(
    team: Team, alice: ToyProject, first_runs: Mapping[str, FlowRun]
) -> None:
    refs = subprocess.check_output(["git", "ls-remote", str(team.origin)], text=True)
    for owner, run in first_runs.items():
        name = f"{owner}-1"
        runs = team.mlflow_runs(name)
        tags = runs["pipeline"]["tags"]
        assert {f"owner:{owner}", "branch:main"} <= set(run.tags)
        assert runs["pipeline"]["name"] == tags["dvc.experiment"] == run.name == name
        assert (tags["mlflow.user"], tags["mlflow.source.git.branch"]) == (owner, "main")
        assert tags["prefect.url"].endswith(run.id)
        assert f"commit:{tags['mlflow.source.git.commit'][:12]}" in run.tags
        assert runs["train"]["tags"]["mlflow.user"] == owner
        assert {record["status"] for record in runs.values()} == {"FINISHED"}
        shown = team.artifacts(run.id)
        assert set(shown) >= ARTIFACTS
        assert runs["pipeline"]["id"] in shown["mlflow-run"]
        assert "data:image/svg+xml" in shown["reward-curve"]
        assert "| train | ran |" in shown["stages"]
        reference = next(line.split()[1] for line in refs.splitlines() if line.endswith(f"/{name}"))
        show = ["git", "show", "--no-patch", "--format=%B", reference]
        message = subprocess.check_output(show, cwd=team.origin, text=True)
        assert tags["prefect.url"] in message
        assert runs["pipeline"]["id"] in message
        params = ["git", "show", f"{reference}:params.yaml"]
        written = yaml.safe_load(subprocess.check_output(params, cwd=team.origin, text=True))
        assert written["seed"] == OVERRIDES[owner]["seed"]
    for host in (alice.path, alice.path.parents[1] / "bob/polyturn"):
        assert not list((host / ".polyturn/worktrees").glob("*"))
    assert subprocess.check_output(["git", "status", "--porcelain"], cwd=alice.path) == b""


def test_a_promotion_is_told(team: Team, alice: ToyProject, told: Inbox) -> None:
    code = "from flows.events import promoted; promoted(name='polyturn-geo3k', version=7, alias='champion')"
    done = alice.run(sys.executable, "-c", code, **team.env, **teams.home_env(alice))
    assert done.returncode == 0, done.stdout
    mail = told.wait_for("polyturn-geo3k has a new champion")
    assert mail["body"] == "version 7 of polyturn-geo3k"


def test_a_fresh_clone_pulls_the_results_and_has_nothing_to_run(
    team: Team, first_runs: Mapping[str, FlowRun]
) -> None:
    desk = team.checkout("desk")
    for command in (
        ("dvc", "exp", "pull", "origin", "alice-1"),
        ("dvc", "exp", "apply", "alice-1"),
        ("git", "add", "params.yaml", "dvc.lock", "metrics.json", "registered.json"),
        ("git", "commit", "-q", "-m", "alice's run"),
        ("git", "push", "-q", "origin", "HEAD:kept"),
    ):
        done = desk.run(*command, **team.env)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
    clone = team.checkout("fresh", branch="kept")
    pulled = clone.run("dvc", "pull", **team.env)
    assert pulled.returncode == 0, pulled.stdout
    repro = clone.run("dvc", "repro", **team.env)
    assert repro.returncode == 0, repro.stdout
    assert "Running stage" not in repro.stdout
    assert "is cached" not in repro.stdout
    assert "Data and pipelines are up to date" in repro.stdout
    assert clone.run("git", "status", "--porcelain").stdout == ""
    for used in (desk, clone):
        shutil.rmtree(used.path.parent)


def test_the_champion_is_scored_by_a_deployment(
    team: Team, first_runs: Mapping[str, FlowRun]
) -> None:
    asked = {"request": {"num": 4, "greedy": True}, "overrides": OVERRIDES["alice"]}
    run = team.wait(team.submit("evaluate/champion", "scored", **asked))
    assert run.state == "COMPLETED", team.logs(run.id)
    assert "accuracy on 4 problems" in team.artifacts(run.id)["evaluation"]


def test_a_run_is_stopped_by_its_name_from_another_machine(team: Team, alice: ToyProject) -> None:
    """`polyturn stop` in a checkout in which it does not run: the stage succeeds, and so do those behind it."""
    run_id = team.submit(
        "pipeline/cpu-demo", "stopped", owner="alice", overrides={**OVERRIDES["alice"], **LONG}
    )
    team.wait_for_line(run_id, "/200 train")
    elsewhere = team.checkout("laptop")
    asked = elsewhere.run("polyturn", "stop", "stopped", **team.env, **teams.home_env(elsewhere))
    assert asked.returncode == 0, asked.stdout
    run = team.wait(run_id)
    assert run.state == "COMPLETED", team.logs(run_id)
    tags = team.mlflow_runs("stopped")["train"]["tags"]
    assert 0 < int(tags["stopped_at"]) < 200
    assert tags["stop_reason"].startswith("requested by polyturn stop")
    assert "training ended early" in team.artifacts(run_id)["stages"]
    shutil.rmtree(elsewhere.path.parent)


def test_a_cancelled_run_leaves_no_process_and_no_open_run(team: Team, alice: ToyProject) -> None:
    """PIPE-24 on a deployment: cancelled in Prefect, KILLED in MLflow, all processes gone within 10 s."""
    run_id = team.submit(
        "pipeline/cpu-demo", "cancelled", overrides={**OVERRIDES["bob"], **LONG, "rollout.temperature": 0.9}
    )  # fmt: skip
    team.wait_for_line(run_id, "/200 train")

    assert len(teams.run_processes(run_id)) >= 3, "the flow, dvc and the stage"
    command = alice.start("prefect", "flow-run", "cancel", run_id, **team.env)
    wait_until(lambda: team.flow_run(run_id).state == "CANCELLING", seconds=30)
    started = time.monotonic()
    wait_until(lambda: not teams.run_processes(run_id), seconds=10)
    print(f"all processes gone {time.monotonic() - started:.1f} s after the request")
    command.communicate(timeout=30)
    assert team.wait(run_id, seconds=30).state == "CANCELLED"
    runs = team.mlflow_runs("cancelled")
    assert (runs["pipeline"]["status"], runs["train"]["status"]) == ("KILLED", "KILLED")


def test_a_stage_whose_host_is_lost_goes_on_on_another_to_the_same_bytes(
    team: Team, first_runs: Mapping[str, FlowRun], alice: ToyProject
) -> None:
    """PIPE-26: training on a GPU worker; worker, processes and directory go; the run ends Crashed, another goes on."""
    # the tiny policy is never right: the entropy bonus gives its weights something to change by
    steps = {"loss.entropy_coef": 0.01, "train.steps": 12, "train.checkpoint_every": 1, "learner.decay_steps": 12, "train.eval_every": 12}  # fmt: skip
    work = {"train.work_uri": "s3://polyturn/work", "storage.endpoint_url": team.s3.endpoint, "train.lease_s": 5.0}  # fmt: skip
    lost = team.checkout("gpu-1")
    team.worker(lost, pool=work_pools.GPU)
    run_id = team.submit(
        "pipeline/cpu-demo",
        "relay",
        overrides={**OVERRIDES["alice"], **steps, **work},
        stages={"train": {"pool": work_pools.GPU, "retries": 2}},
    )
    team.wait_for_line(run_id, "goes to pool")
    wait_until(
        lambda: any("/snapshot_" in key for key in team.s3.keys("work/")), seconds=teams.RUN_S
    )
    child = team.api("flow_runs/filter", {"flow_runs": {"name": {"any_": ["relay-train"]}}})[0]["id"]  # fmt: skip
    teams.lose(lost)
    team.worker(team.checkout("gpu-2"), pool=work_pools.GPU)
    ended = team.wait(child, seconds=240)
    assert ended.state == "CRASHED"
    run = team.wait(run_id)
    assert run.state == "COMPLETED", team.logs(run_id)
    (again,) = [
        found
        for found in team.api(
            "flow_runs/filter", {"flow_runs": {"name": {"any_": ["relay-train"]}}}
        )
        if found["id"] != child
    ]
    assert "fetched the checkpoint of step" in team.logs(again["id"])
    assert team.s3.keys("work/") == [], "checkpoints in progress go when the outputs are in place"
    assert team.mlflow_statuses("relay", "train") == ["KILLED", "FINISHED"]

    clone = team.checkout("reference")
    for command in (("dvc", "exp", "pull", "origin", "relay"), ("dvc", "exp", "apply", "relay")):
        done = clone.run(*command, **team.env)
        assert done.returncode == 0, done.stdout
    relayed = policy_in(clone.path)
    workspace.write_params(clone.path, {"train": {"resume": "never", "work_uri": ""}})
    whole = clone.run("dvc", "repro", "--force", "--no-run-cache", "--single-item", "train", **team.env)  # fmt: skip
    assert whole.returncode == 0, whole.stdout
    assert "Running stage 'train'" in whole.stdout
    assert policy_in(clone.path) == relayed
    digests = {
        name: team.mlflow_runs(name)["train"]["tags"]["weights.sha256"]
        for name in ("relay", "alice-1")
    }
    assert digests["relay"] != digests["alice-1"], "it learned something"


def policy_in(directory: Path) -> str:
    """The digest that dvc.lock holds for the published policy."""
    outs = yaml.safe_load((directory / layout.DVC_LOCK).read_text())["stages"]["train"]["outs"]
    return next(out["md5"] for out in outs if out["path"] == str(layout.POLICY))
