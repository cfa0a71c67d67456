"""The Prefect flow over toy stages: order, retries, cancel, worktrees."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prefect.cache_policies import NO_CACHE
from prefect.tasks import Task

from flows import evaluate, graph, publish
from flows.stage import run_elsewhere
from polyturn import processes
from polyturn.pipeline.workspace import WorkspaceError
from tasks.stage import run_dvc_stage
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow
Toy = Callable[..., ToyProject]
FLOW = (sys.executable, "-m", "flows.pipeline")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Prefect server for all tests of this file: its address and home."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = tmp_path_factory.mktemp("prefect")
    env = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
        )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, seconds=120)
    yield env
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)


def task_lines(output: str) -> list[str]:
    """Lines that the flow logged, without time and level."""
    return [line.partition(" - ")[2] for line in output.splitlines() if " - " in line]


def test_stages_run_in_order_and_a_second_run_runs_none(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one="print('says one')", two="pass")
    first = project.run(*FLOW, **server)
    assert first.returncode == 0, first.stdout
    lines = task_lines(first.stdout)
    order = [line for line in lines if line.startswith("Running stage") or line == "says one"]
    assert order == ["Running stage 'one':", "says one", "Running stage 'two':"]
    runs = project.runs()
    assert sorted([*runs["one"], *runs["two"]]) == ["FINISHED", "FINISHED"]
    assert len(runs) == 3, "the stages' runs and their parent"
    second = project.run(*FLOW, **server)
    assert second.returncode == 0
    assert "Running stage" not in second.stdout
    assert len(project.runs()) == 3, "no run is opened where nothing runs"


def test_a_users_mistake_is_not_tried_again(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one='raise ValueError("data.path: no such directory")', two="pass")
    result = project.run(*FLOW, **server)
    assert result.returncode == 2
    assert result.stdout.count("Running stage 'one'") == 1
    assert "Running stage 'two'" not in result.stdout
    assert "error: stage one: data.path: no such directory" in result.stdout
    assert "Traceback" not in result.stdout


def test_another_failure_is_tried_once_more(toy: Toy, server: dict[str, str]) -> None:
    body = """
    marker = ctx.work_dir / "tried"
    if not marker.exists():
        marker.touch()
        raise RuntimeError("a hiccup")
    """
    project = toy(one=body)
    result = project.run(*FLOW, **server)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("Running stage 'one'") == 2
    assert project.runs()["one"] == ["FAILED", "FINISHED"]


def test_an_exception_fails_the_run_everywhere_and_is_named(
    toy: Toy, server: dict[str, str]
) -> None:
    """PIPE-02: FAILED in MLflow with class and message, Failed in Prefect, exit code 1."""
    project = toy(one='raise KeyError("reward")', two="pass")
    result = project.run(*FLOW, **server)
    assert result.returncode == 1
    assert result.stdout.count("Running stage 'one'") == 2, "tried again once"
    runs = project.runs()
    assert runs.pop("one") == ["FAILED", "FAILED"]
    assert list(runs.values()) == [["FAILED"]], "the run around them"
    code = (
        "from mlflow import MlflowClient as C; c = C('sqlite:///mlflow.db');"
        "rs = c.search_runs([e.experiment_id for e in c.search_experiments()], \"tags.stage = 'one'\");"
        "print(rs[0].data.tags['error.class'], rs[0].data.tags['error.message'])"
    )
    told = project.run(sys.executable, "-W", "ignore", "-c", code).stdout.splitlines()[-1]
    assert told == "KeyError 'reward'"
    states = httpx.post(f"{server['PREFECT_API_URL']}/flow_runs/filter", json={"limit": 1, "sort": "START_TIME_DESC"})  # fmt: skip
    assert states.json()[0]["state"]["type"] == "FAILED"
    assert "stage one: KeyError: 'reward'" in states.json()[0]["state"]["message"]


def test_a_flow_waits_for_a_lock_of_another_dvc(toy: Toy, server: dict[str, str]) -> None:
    """PIPE-16: `dvc repro` of a stage is at work in the same checkout; the flow waits, and both succeed."""
    project = toy(one='Path("started").touch(); time.sleep(12)', two="pass")
    other = project.start("dvc", "repro", "one")
    wait_until((project.path / "started").exists, seconds=60)
    result = project.run(*FLOW, **server)
    output, _ = other.communicate(timeout=60)
    assert other.returncode == 0, output
    assert result.returncode == 0, result.stdout
    assert project.runs()["one"] == ["FINISHED"]


@pytest.mark.parametrize("task", [run_dvc_stage, run_elsewhere, publish.publish, evaluate.score])
def test_tasks_take_paths_and_names_and_nothing_of_theirs_is_cached(
    task: Task[..., object],
) -> None:
    """PIPE-29: no tensors, pictures or clients between tasks, so that there is nothing for Prefect to hash."""
    assert task.cache_policy == NO_CACHE
    assert not task.persist_result
    plain = {"str", "Path", "Mapping[str, str]", "Sequence[str]", "Place", "StageOptions", "str | None"}  # fmt: skip
    kinds = {p.annotation for p in inspect.signature(task.fn).parameters.values()}
    assert kinds <= plain


def test_a_name_at_work_is_refused(toy: Toy, server: dict[str, str]) -> None:
    """Two runs of one name would work in one worktree."""
    project = toy(one='Path("../../../started").touch(); time.sleep(60)')
    code = "from flows.pipeline import pipeline; pipeline.with_options(flow_run_name='twin')()"
    first = project.start(sys.executable, "-c", code, **server)
    wait_until((project.path / "started").exists, seconds=90)
    second = project.run(sys.executable, "-c", code, **server)
    assert second.returncode != 0
    assert "a run called twin is already running as pid" in second.stdout
    assert (project.path / ".polyturn/worktrees/twin/params.yaml").exists(), "that of the first"
    os.kill(first.pid, signal.SIGTERM)
    first.communicate(timeout=60)


def test_wrong_overrides_stop_before_anything_runs(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one="pass")
    before = (project.path / "params.yaml").read_text()
    result = project.run(*FLOW, "--set", "train.stepz=3", **server)
    assert result.returncode == 2
    assert [line for line in result.stdout.splitlines() if line.startswith("error:")] == [
        result.stdout.strip().splitlines()[-1]
    ]
    assert (project.path / "params.yaml").read_text() == before
    assert "Running stage" not in result.stdout


_FAMILY = """
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
heard = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=heard)
# a child of a child, whose parent is gone, in a session of its own, which does not listen to SIGTERM
middle = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True, stdout=sys.stderr); print(p.pid)"
grandchild = int(subprocess.check_output([sys.executable, "-c", middle + "; import time; time.sleep(1)"]).split()[0])
child.stdout.readline()
Path("started").write_text(f"{os.getpid()} {child.pid} {grandchild}")
"""


def family_of(project: ToyProject) -> list[processes.Process]:
    """Wait for the processes that _FAMILY names."""
    started = project.path / "started"
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 3, seconds=60)
    found = [processes.find(int(pid)) for pid in started.read_text().split()]
    assert all(found)
    return [process for process in found if process]


def test_cancelling_ends_the_stage_its_children_and_theirs(
    toy: Toy, server: dict[str, str]
) -> None:
    """PIPE-24."""
    project = toy(one=_FAMILY + "time.sleep(300)")
    flow = project.start(*FLOW, **server)
    family = family_of(project)
    os.kill(flow.pid, signal.SIGTERM)
    wait_until(lambda: not any(p.is_alive for p in family), seconds=10)
    flow.communicate(timeout=60)
    assert flow.returncode != 0
    runs = project.runs()
    assert set(map(tuple, runs.values())) == {("KILLED",)}, "the stage's run and the one around it"


def test_a_run_that_was_started_by_hand_is_cancelled_as_well(
    toy: Toy, server: dict[str, str]
) -> None:
    """PrefectHQ/prefect#17482, #9801: it is Cancelled for the server, and goes on."""
    project = toy(one='Path("started").write_text(str(os.getpid())); time.sleep(300)')
    process = project.start(*FLOW, **server)
    wait_until((project.path / "started").exists, seconds=60)
    stage = processes.find(int((project.path / "started").read_text()))
    assert stage is not None
    query = {"limit": 1, "sort": "START_TIME_DESC"}
    (found,) = httpx.post(f"{server['PREFECT_API_URL']}/flow_runs/filter", json=query).json()
    project.run("prefect", "flow-run", "cancel", found["id"], **server)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "cancelled"
    assert not stage.is_alive
    ended = httpx.get(f"{server['PREFECT_API_URL']}/flow_runs/{found['id']}").json()
    assert ended["state_type"] == "CANCELLED"
    assert {state for states in project.runs().values() for state in states} == {"KILLED"}


def test_what_a_stage_leaves_behind_is_ended(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one=_FAMILY)
    result = project.run(*FLOW, **server)  # ends, though a child still holds the output
    assert result.returncode == 0, result.stdout
    assert "stage one left processes behind" in result.stdout
    assert not any(process.is_alive for process in leftovers(project))


def leftovers(project: ToyProject) -> list[processes.Process]:
    """Those of the family's ids that are processes now."""
    pids = (project.path / "started").read_text().split()
    return [process for pid in pids if (process := processes.find(int(pid)))]


@pytest.mark.parametrize("victim", ["flow", "dvc"])
def test_children_of_children_do_not_outlive_a_flow_or_dvc_that_was_killed(
    toy: Toy, server: dict[str, str], victim: str
) -> None:
    project = toy(one=_FAMILY + "time.sleep(300)")
    flow = project.start(*FLOW, **server)
    family = family_of(project)
    if victim == "flow":
        flow.kill()
    else:
        stage_parent = int(Path(f"/proc/{family[0].pid}/stat").read_text().rpartition(")")[2].split()[1])  # fmt: skip
        os.kill(stage_parent, signal.SIGKILL)
        os.kill(flow.pid, signal.SIGTERM)
    wait_until(lambda: not any(p.is_alive for p in family), seconds=15)
    flow.communicate(timeout=60)


def test_a_stage_does_not_outlive_a_flow_that_was_killed(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one='Path("started").write_text(str(os.getpid())); time.sleep(300)')
    flow = project.start(*FLOW, **server)
    started = project.path / "started"
    wait_until(lambda: started.exists() and bool(started.read_text()), seconds=90)
    stage = processes.find(int(started.read_text()))
    assert stage is not None
    flow.kill()
    wait_until(lambda: not stage.is_alive, seconds=15)
    flow.communicate(timeout=30)
    assert project.runs()["one"] == ["KILLED"]


def test_a_run_in_a_worktree_leaves_the_checkout_alone(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one='Path("place").write_text(os.getcwd())')
    result = project.run(*FLOW, "--worktree", "--set", "seed=4", **server)
    assert result.returncode == 0, result.stdout
    assert not (project.path / "artifacts").exists()
    assert not list((project.path / ".polyturn/worktrees").iterdir()), "it is removed at the end"
    (kept,) = (project.path / "runs").glob("*/params.yaml")
    assert re.search(r"^seed: 4$", kept.read_text(), re.MULTILINE)
    assert (kept.parent / "report.html").is_file()
    # the result is in the shared cache: the same run here restores it
    again = project.run(*FLOW, "--set", "seed=4", **server)
    assert again.returncode == 0
    assert "is cached - skipping run" in again.stdout


BROKEN = {
    "dvc.lock": ("<<<<<<< HEAD\n{}=======\n>>>>>>> theirs\n", "take one side's, or remove it"),
    "dvc.yaml": ("{}\n  x: [", "YAML file structure is corrupted"),
    ".dvc/tmp/rwlock": ("", "remove .dvc/tmp/rwlock when no dvc works there"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_dvc_cannot_read_is_one_line_that_says_how_to_go_on(toy: Toy, name: str) -> None:
    """treeverse/dvc#7615 (a lock that Ctrl-C has cut), #3164; marks of a merge in dvc.lock."""
    project = toy(one="pass")
    assert project.run("dvc", "repro", "--quiet").returncode == 0
    text, advice = BROKEN[name]
    path = project.path / name
    path.write_text(text.format(path.read_text() if path.is_file() else ""))
    with pytest.raises(WorkspaceError) as caught:
        graph.read(project.path)
    planned = project.run(sys.executable, "-m", "polyturn.cli", "plan")
    (line,) = planned.stdout.splitlines()
    for said in (str(caught.value), line):
        assert "\n" not in said
        assert Path(name).name in said
        assert advice in said or name == "dvc.yaml"


def test_a_checkout_without_git_is_one_line(toy: Toy, tmp_path: Path) -> None:
    """treeverse/dvc#3461: a downloaded archive is no repository; and a machine without git."""
    project = toy(one="pass")
    (tmp_path / "bin").mkdir()
    without_git = project.run(*FLOW, PATH=str(tmp_path / "bin"))
    shutil.rmtree(project.path / ".git")
    downloaded = project.run(*FLOW)
    for result, said in (
        (without_git, "error: git is not there: install git, or put it into PATH"),
        (downloaded, f"error: {project.path} is no git repository (a downloaded archive?)"),
    ):
        assert result.returncode == 2
        (line,) = result.stdout.splitlines()
        assert line.startswith(said)


def test_a_prefect_server_that_does_not_answer_is_named(toy: Toy) -> None:
    project = toy(one="pass")
    result = project.run(*FLOW, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert result.returncode == 2
    assert "error: PREFECT_API_URL: the Prefect server at http://127.0.0.1:9/api" in result.stdout


def test_a_port_in_use_is_named(toy: Toy) -> None:
    project = toy(one="pass")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = project.run(sys.executable, "scripts/services.py", "start", "--port", str(port))
    assert result.returncode == 2
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"error: port {port} is in use")
    assert f"PORT={port + 1}" in line


def test_services_are_not_ended_under_a_run_and_a_lost_run_is_no_run(toy: Toy) -> None:
    """PrefectHQ/prefect#16746, #18257: a run whose worker is gone stays Running for ever."""
    project = toy(one='Path("started").touch(); time.sleep(120)')
    state = project.path / ".polyturn"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    services = (sys.executable, "scripts/services.py")
    run = ("prefect", "deployment", "run", "pipeline/cpu-demo", "--flow-run-name")
    try:
        assert project.run(*services, "start", "--port", port).returncode == 0
        assert project.run(*run, "first").returncode == 0
        wait_until((state / "worktrees/first/started").exists, seconds=60)
        refused = project.run(*services, "stop")
        assert refused.returncode == 2
        (line,) = refused.stdout.splitlines()
        assert line.startswith("error: at work: first; wait for their end")
        for name in ("worker", "server"):  # the machine goes down
            text = (state / f"services/{name}.pid").read_text()
            os.killpg(processes.parse(text).pid, signal.SIGKILL)
        os.kill(json.loads((state / "locks/first.lock").read_text())["pid"], signal.SIGKILL)
        up = project.run(*services, "start", "--port", port)
        assert "marked Crashed, as their processes are gone: first" in up.stdout
        assert project.run(*run, "second").returncode == 0
        wait_until((state / "worktrees/second/started").exists, seconds=60)
        forced = project.run(*services, "stop", "--force")
        assert forced.returncode == 0
        assert forced.stdout.splitlines()[0] == "cancelling second"
        with closing(sqlite3.connect(project.path / ".prefect/prefect.db")) as database:
            found = dict(database.execute("SELECT name, state_type FROM flow_run"))
        assert found == {"first": "CRASHED", "second": "CANCELLED"}
        assert {state for ended in project.runs().values() for state in ended} == {"KILLED"}
    finally:
        project.run(*services, "stop", "--force")


@pytest.mark.full
def test_an_outage_of_the_server_neither_ends_a_run_nor_keeps_it_from_being_cancelled(
    toy: Toy,
) -> None:
    """PrefectHQ/prefect#8080, #17482: runs crash with the server's hiccups, and go on though they are cancelled.

    The server is away for longer than Prefect's client waits (62 s), and than its watch of cancelled runs.
    """
    body = """
    (Path("../../..") / ctx.name).touch()
    progress = Progress(10_000, ctx.name)
    for _ in range(900 if ctx.name == "one" else 10_000):
        progress.update()
        time.sleep(0.1)
    """
    project = toy(one=body, two=body)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    services = (sys.executable, "scripts/services.py")
    state = project.path / ".polyturn"
    try:
        assert project.run(*services, "start", "--port", port).returncode == 0
        run = project.run("prefect", "deployment", "run", "pipeline/cpu-demo")
        run_id = re.findall(r"flow-run/([0-9a-f-]{36})", run.stdout)[-1]
        wait_until((project.path / "one").exists, seconds=60)
        os.killpg(processes.parse((state / "services/server.pid").read_text()).pid, signal.SIGKILL)
        time.sleep(75)
        assert project.run(*services, "start", "--port", port).returncode == 0
        wait_until((project.path / "two").exists, seconds=120)
        project.run("prefect", "flow-run", "cancel", run_id)

        def is_cancelled() -> bool:
            with closing(sqlite3.connect(project.path / ".prefect/prefect.db")) as database:
                return list(database.execute("SELECT state_type FROM flow_run")) == [("CANCELLED",)]

        wait_until(is_cancelled, seconds=60)
        runs = project.runs()
        assert runs.pop("one") == ["FINISHED"]
        assert [*runs.values()] == [["KILLED"], ["KILLED"]], (
            "the second stage and the run around them"
        )
    finally:
        project.run(*services, "stop", "--force")


def test_a_deployment_runs_on_the_worker_that_services_start(toy: Toy, tmp_path: Path) -> None:
    project = toy(one="pass")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    services = (sys.executable, "scripts/services.py")
    try:
        up = project.run(*services, "start", "--port", str(port))
        assert up.returncode == 0, up.stdout
        command = ("prefect", "deployment", "run", "pipeline/cpu-demo", "--watch")
        done = project.run(*command, "-p", 'overrides={"seed": 9}')
        assert "finished successfully" in done.stdout, done.stdout
        assert list((project.path / "runs").glob("*/report.html"))
        assert project.run(*services, "start", "--port", str(port + 1)).returncode == 0
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) == 0, "a server that runs keeps its port"
    finally:
        down = project.run(*services, "stop")
    assert "server (pid" in down.stdout
    assert "worker (pid" in down.stdout
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
