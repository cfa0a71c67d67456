"""`polyturn accept`: outputs stay after a harmless edit of code, and of nothing else; what was accepted is recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from polyturn.pipeline import accepted, workspace
from tests.toy_project import ToyProject

ACCEPT = ("python", "-m", "polyturn.cli", "accept")


@pytest.fixture(scope="module")
def ran(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """Two stages that have run, with dvc.lock committed."""
    path = tmp_path_factory.mktemp("ran") / "toy"
    project = ToyProject.create(path, source=root, bodies={"one": "pass", "two": "pass"})
    assert project.run("dvc", "repro").returncode == 0
    project.commit()
    return project


@pytest.fixture
def project(ran: ToyProject, tmp_path: Path) -> ToyProject:
    """A copy of it."""
    shutil.copytree(ran.path, tmp_path / "toy", symlinks=True)
    return ToyProject(tmp_path / "toy")


def edit(project: ToyProject, text: str, stage: str = "one") -> None:
    with (project.path / f"tasks/{stage}.py").open("a") as file:
        file.write(text)


def lock(project: ToyProject) -> dict[str, dict[str, list[dict[str, str]]]]:
    return yaml.safe_load((project.path / "dvc.lock").read_text())["stages"]


def test_outputs_stay_after_a_harmless_edit_and_the_reason_is_kept(project: ToyProject) -> None:
    before = lock(project)["one"]
    edit(project, "# a comment\n")
    result = project.run(*ACCEPT, "one", "--reason", "a comment", POLYTURN_USER="ada")
    assert result.returncode == 0, result.stdout
    assert "one: outputs kept after edits of tasks/one.py" in result.stdout
    after = lock(project)["one"]
    assert after["outs"] == before["outs"]
    (record,) = map(json.loads, (project.path / "accepted.jsonl").read_text().splitlines())
    digests = [accepted.digests(entry, "deps")["tasks/one.py"] for entry in (before, after)]
    assert digests[0] != digests[1]
    assert record["files"] == {"tasks/one.py": digests}
    assert (record["stage"], record["by"]) == ("one", "ada")
    assert record["commit"] == project.git("rev-parse", "HEAD")
    rerun = project.run("dvc", "repro")
    assert "Running stage" not in rerun.stdout, rerun.stdout
    commit = record["commit"][:10]
    assert accepted.tags(project.path) == {"accepted.one": f"a comment (by ada, {commit})"}


def test_a_new_plugin_is_code(project: ToyProject) -> None:
    """Another environment in plugins/ makes all stages stale that load user code, long trainings among them."""
    (project.path / "plugins").mkdir()
    (project.path / "plugins" / "__init__.py").touch()
    graph = yaml.safe_load((project.path / "dvc.yaml").read_text())
    graph["stages"]["one"]["deps"].append("plugins")
    (project.path / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    assert project.run("dvc", "repro", "one").returncode == 0
    (project.path / "plugins" / "another.py").write_text("")
    result = project.run(*ACCEPT, "one", "--reason", "nothing loads it")
    assert result.returncode == 0, result.stdout
    assert "one: outputs kept after edits of plugins" in result.stdout
    assert "Running stage" not in project.run("dvc", "repro", "one").stdout


def test_an_acceptance_says_nothing_of_outputs_that_a_run_has_made(project: ToyProject) -> None:
    edit(project, "# a comment\n")
    assert project.run(*ACCEPT, "one", "--reason", "a comment").returncode == 0
    code = project.path / "tasks/one.py"
    code.write_text(code.read_text().replace('write_text("one")', 'write_text("another")'))
    assert project.run("dvc", "repro").returncode == 0
    assert accepted.tags(project.path) == {}
    assert len(accepted.read(project.path)) == 1, "the record stays"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("data", "dep data.txt: modified"),
        ("params", "param seed: 0 -> 7; --with-params accepts"),
        ("outs", "out artifacts/one: modified"),
        ("nothing", "one is up to date"),
        ("stage", "dvc.yaml has no stage 'none', only one, two"),
        ("reason", "--reason must say why"),
    ],
)
def test_what_may_change_the_outputs_is_not_accepted(
    project: ToyProject, change: str, named: str
) -> None:
    before = (project.path / "dvc.lock").read_text()
    if change != "nothing":
        edit(project, "# a comment\n")
    if change == "data":
        (project.path / "data.txt").write_text("other")
    elif change == "params":
        workspace.write_params(project.path, {"seed": 7})
    elif change == "outs":
        out = project.path / "artifacts/one/done"
        out.unlink()
        out.write_text("by hand")
    stage = "none" if change == "stage" else "one"
    reason = " " if change == "reason" else "why not"
    result = project.run(*ACCEPT, stage, "--reason", reason)
    assert result.returncode == 2, result.stdout
    assert named in result.stdout
    assert (project.path / "dvc.lock").read_text() == before
    assert not (project.path / "accepted.jsonl").exists()


def test_params_are_accepted_where_that_is_said(project: ToyProject) -> None:
    workspace.write_params(project.path, {"train": {"warn_logprob_gap": 0.06}})
    result = project.run(*ACCEPT, "one", "--reason", "only a warning", "--with-params")
    assert result.returncode == 0, result.stdout
    assert "edits of params" in result.stdout
    assert "Running stage 'one'" not in project.run("dvc", "repro").stdout


def test_a_line_that_is_no_acceptance_is_named(tmp_path: Path) -> None:
    (tmp_path / "accepted.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"accepted.jsonl, line 1 is no acceptance"):
        accepted.read(tmp_path)
