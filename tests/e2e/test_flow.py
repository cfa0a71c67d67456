"""The Prefect flow over toy stages: order, retries, worktrees, and what it refuses."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import httpx
import pytest
from prefect.cache_policies import NO_CACHE
from prefect.tasks import Task

from flows import evaluate, graph, publish
from flows.stage import run_elsewhere
from polyturn.pipeline.workspace import WorkspaceError
from tasks.stage import run_dvc_stage
from tests.toy_project import FLOW, Toy, wait_until

pytestmark = pytest.mark.slow(minutes=2)


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


def test_a_users_mistake_is_not_tried_again(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one='raise ValueError("data.path: no such directory")', two="pass")
    result = project.run(*FLOW, **server)
    assert result.returncode == 2
    assert result.stdout.count("Running stage 'one'") == 1
    assert "Running stage 'two'" not in result.stdout
    assert "error: stage one: data.path: no such directory" in result.stdout
    assert "Traceback" not in result.stdout


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
