"""`polyturn plan`: what would run, why (values, code, files), and time and cost as of the last runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from polyturn.pipeline import plan, workspace
from polyturn.pipeline.code_history import code_change
from polyturn.pipeline.plan import Plan, StagePlan
from polyturn.pipeline.plan_reasons import Reason
from tests.toy_project import ToyProject, wait_until

Toy = Callable[..., ToyProject]


def shown(project: ToyProject, *arguments: str) -> list[str]:
    result = project.run("python", "-m", "polyturn.cli", "plan", *arguments)
    assert result.returncode == 0, result.stdout
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def ran(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """Three stages that have run, with dvc.lock committed."""
    path = tmp_path_factory.mktemp("ran") / "toy"
    bodies = {"one": "pass", "two": "pass", "three": "pass"}
    project = ToyProject.create(path, source=root, bodies=bodies)
    assert project.run("dvc", "repro").returncode == 0
    project.commit()
    return project


@pytest.fixture
def project(ran: ToyProject, tmp_path: Path) -> ToyProject:
    """A copy of it."""
    shutil.copytree(ran.path, tmp_path / "toy", symlinks=True)
    return ToyProject(tmp_path / "toy")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_fresh_checkout_names_stages_not_files(toy: Toy) -> None:
    assert shown(toy(one="pass", two="pass")) == [
        "one  runs",
        "    command one: never ran in this checkout",
        "two  runs",
        "    command two: never ran in this checkout",
    ]


def test_nothing_runs_where_nothing_has_changed(project: ToyProject) -> None:
    """PIPE-20, as the plan says it."""
    assert shown(project) == ["nothing would run: everything is up to date"]


def test_a_changed_param_is_shown_with_its_old_and_new_value(project: ToyProject) -> None:
    workspace.write_params(project.path, {"train": {"steps": 7, "stop": {"plateau_evals": 3}}})
    lines = shown(project)
    assert lines[0].startswith("one    runs        ")
    assert lines[1:3] == [
        "    param   train.steps: 40 -> 7",
        '    param   train.stop: default -> {"plateau_evals": 3}',
    ]
    assert [line.split()[:2] for line in lines if not line.startswith(" ")][:3] == [
        ["one", "runs"],
        ["two", "runs"],
        ["three", "runs"],
    ]


def test_changed_code_is_shown_against_the_version_that_ran(project: ToyProject) -> None:
    """Not against the newest commit, which may have changed it already."""
    code = project.path / "tasks/two.py"
    since = project.git("log", "-1", "--format=%H", "--", "tasks/two.py")
    edit(code, "out.mkdir(parents=True)", "out.mkdir(parents=True)  # a first edit")
    project.commit()
    edit(code, "import os", "# a second edit\nimport os")
    lines = shown(project)
    assert lines[0] == "one    up to date"
    assert lines[1].startswith("two    runs")
    assert lines[2] == f"    code    tasks/two.py: +2 -1 since {since[:10]}"
    assert lines[3].startswith("three  may run")
    diff = "\n".join(shown(project, "--diff"))
    assert "|+    out.mkdir(parents=True)  # a first edit".replace("|", "    | ") in diff
    assert "    | +# a second edit" in diff


def test_code_that_ran_with_uncommitted_edits_is_said_to_be_in_no_commit(
    project: ToyProject,
) -> None:
    code = project.path / "tasks/three.py"
    edit(code, "import os", "import os  # never committed")
    assert project.run("dvc", "repro").returncode == 0
    edit(code, "never committed", "committed")
    project.commit()
    assert "    code    tasks/three.py: modified; the version that ran is in no commit" in shown(
        project
    )


def test_a_changed_input_and_a_missing_output_are_named(project: ToyProject) -> None:
    (project.path / "data.txt").write_text("other\n")
    (project.path / "artifacts/two/done").unlink()
    lines = shown(project)
    assert lines[1] == "    dep     data.txt: modified"
    assert "    out     artifacts/two: modified" in lines


def test_time_and_cost_are_those_of_the_last_runs(project: ToyProject) -> None:
    workspace.write_params(
        project.path,
        {"seed": 5, "doctor": {"prices_per_hour": {"default": 0.5, "two": 36.0}}},
    )
    timings = project.path / plan.TIMINGS
    records = [("one", 999), ("one", 8.4), ("two", 200), ("three", 7200)]
    lines = [json.dumps({"stage": s, "seconds": t}) for s, t in records]
    timings.write_text("\n".join([*lines, '{"stage": "one", "sec']))  # the last was cut by a kill
    lines = shown(project)
    assert "one    runs        8.4 s, 0.00" in lines
    assert "two    runs        3.3 min, 2.00" in lines
    assert "three  runs        2.0 h, 1.00" in lines
    assert lines[-1] == "as in the last runs: 2.1 h, 3.00 at doctor.prices_per_hour"


def test_a_worktree_knows_the_times_of_its_main_checkout(project: ToyProject) -> None:
    path = workspace.create(project.path, "mine", {"seed": 3})
    assert set(plan.last_seconds(path)) == {"one", "two", "three"}
    inside = ToyProject(path)
    assert inside.run("dvc", "repro").returncode == 0
    workspace.remove(project.path, path)
    lines = (project.path / plan.TIMINGS).read_text().splitlines()
    assert len(lines) == 6, "what ran in the worktree is known when it is gone"


def test_stages_without_a_known_time_are_named() -> None:
    reason = Reason("dep", "a", "modified")
    stages = [
        StagePlan("one", "runs", [reason], 10.0, None),
        StagePlan("two", "may run", [], None, None),
        StagePlan("three", "up to date", [], 99.0, None),
    ]
    lines = plan.lines(Plan(stages))
    assert lines[-1] == "as in the last runs: 10.0 s, and what is not known of two"


def test_the_first_reasons_are_shown_and_the_rest_counted() -> None:
    reasons = [Reason("dep", f"file{i}", "modified") for i in range(plan.MAX_REASONS + 2)]
    one = Plan([StagePlan("one", "runs", reasons, None, None)])
    lines = plan.lines(one)
    assert lines[1] == "    dep     file0: modified"
    assert lines[-1] == "    and 2 more (`polyturn plan --diff` shows all)"
    assert len(plan.lines(one, with_diffs=True)) == 1 + len(reasons)


def test_dvc_that_cannot_say_is_told(toy: Toy) -> None:
    project = toy(one="pass")
    (project.path / "dvc.yaml").write_text("stages: {one: {}}")
    result = project.run("python", "-m", "polyturn.cli", "plan")
    assert result.returncode == 2
    assert result.stdout.startswith("error: dvc status: './dvc.yaml' validation failed")


def test_a_dvc_that_works_in_the_checkout_is_named_with_its_process(toy: Toy) -> None:
    """Not with DVC's own advice, which is to delete its lock."""
    project = toy(one="import time; open('started', 'w').close(); time.sleep(60)")
    dvc = project.start("dvc", "repro")
    try:
        wait_until((project.path / "started").exists, process=dvc)
        result = project.run("python", "-m", "polyturn.cli", "plan")
    finally:
        os.killpg(dvc.pid, signal.SIGKILL)
        dvc.communicate()
    assert result.returncode == 2
    found = r"error: \(PID \d+\): .*dvc repro works in this checkout; ask again when it has ended\n"
    assert re.fullmatch(found, result.stdout), result.stdout


def test_a_file_outside_git_has_no_version_that_ran(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    assert code_change(tmp_path, "a.py", "0" * 32).since is None


def test_params_that_were_added_read_as_default_before(project: ToyProject) -> None:
    tree = yaml.safe_load((project.path / "params.yaml").read_text())
    tree["train"]["lease_s"] = 5.0
    (project.path / "params.yaml").write_text(yaml.safe_dump(tree))
    assert "    param   train.lease_s: default -> 5.0" in shown(project)
