"""The polyturn command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyturn
from polyturn import layout, params
from polyturn.cli import commands as cli
from polyturn.data.files import write_jsonl
from polyturn.policy import model
from polyturn.trajectories import save_pictures
from polyturn.types import Problem
from tests.unit import tiny

COMMANDS = (
    "use",
    "plan",
    "accept",
    "storage",
    "launch",
    "report",
    "view",
    "play",
    "evaluate",
    "doctor",
    "stop",
)


@pytest.fixture
def checkout(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: params.yaml and the recipes."""
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    (tmp_path / "recipes").symlink_to(root / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_use_writes_recipe_and_overrides(checkout: Path) -> None:
    assert cli.main(["use", "tiny", "--set", "train.steps=7"]) == 0
    written = params.load(checkout / "params.yaml")
    assert (written.train.steps, written.data.num_test) == (7, 16)


def test_use_without_a_recipe_lists_them(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["use"]) == 0
    assert "tiny" in capsys.readouterr().out.splitlines()


def test_a_mistake_is_one_line_and_exit_code_two(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (checkout / "params.yaml").read_text()
    assert cli.main(["use", "tiny", "--set", "train.stepz=7"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "error: params.yaml + tiny + overrides: train.stepz is not a key"
    )
    assert len(captured.err.splitlines()) == 1
    assert (checkout / "params.yaml").read_text() == before


@pytest.mark.parametrize(("answer", "code"), [("5", 0), ("6", 1)])
def test_grade_hands_its_arguments_on(answer: str, code: int) -> None:
    assert cli.main(["grade", answer, "5"]) == code


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["--version"])
    assert ending.value.code == 0
    assert capsys.readouterr().out == f"polyturn {polyturn.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in (*COMMANDS, "grade"))


def test_viewing_what_is_not_there_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", "absent"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "absent" in line
    assert not (checkout / "runs").exists()


def test_what_came_back_of_a_worktree_is_viewed_through_its_registered_version(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returned = checkout / "runs/name"
    returned.mkdir(parents=True)
    (returned / layout.REGISTERED).write_text('{"name": "toy", "version": 3}')
    assert cli.main(["view", "runs/name"]) == 2
    assert "toy/3" in capsys.readouterr().err
    (returned / layout.TRAJECTORIES).mkdir(parents=True)  # a checkout that has its own
    assert cli.main(["view", "runs/name"]) == 2
    assert "runs/name holds no trajectories" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main([name, "--help"])
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: polyturn {name}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate"], "problems.jsonl is not there; run `dvc repro model`"),
        (["play", "--env", "nowhere"], "module 'polyturn.envs.nowhere'"),
        (["play", "--problem", "nothing"], "no data set is built here"),
        (["play", "--recipe", "nothing"], "nothing"),
        (["play", "--set", "train.steps"], "train.steps"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    arguments: list[str], said: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_path_that_cannot_be_written_is_one_clear_line(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "runs").write_text("a file where a directory belongs")
    assert cli.main(["report"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "runs" in line


def test_evaluate_prints_the_difference_that_pictures_make(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random policy answers nothing right, with pictures or without."""
    problems = tiny.problems(3, "test")
    save_pictures(layout.IMAGES / "png", [image for p in problems for image in p.images])
    write_jsonl(layout.PROBLEMS / "problems.jsonl", map(_row, problems))
    model.save(tiny.qwen3(), layout.POLICY)
    assert cli.main(["evaluate", "--ablate-images", "--num", "2", "--greedy"]) == 0
    shown = capsys.readouterr().out.splitlines()
    lines = [line for line in shown if not line.startswith("::progress")]
    assert lines[0].startswith("accuracy on 2 problems")
    assert lines[1].startswith("with blank pictures ")
    assert re.fullmatch(
        r"difference \(paired, 95%\) +\+0\.000 \[[-+]\d\.\d{3}, [-+]\d\.\d{3}\]", lines[2]
    )
    assert cli.main(["evaluate", "--num", "0"]) == 2
    assert "--num must be at least 1" in capsys.readouterr().err
    assert cli.main(["evaluate", "--policy", "absent"]) == 2
    told = capsys.readouterr().err
    assert "--policy absent is no directory, and of the registry: 'absent' is no version" in told
    Path("empty").mkdir()
    assert cli.main(["evaluate", "--policy", "empty"]) == 2
    assert "--policy empty holds no config.json" in capsys.readouterr().err


def _row(problem: Problem) -> dict[str, object]:
    (image,) = problem.images
    return {
        "id": problem.id,
        "split": problem.split,
        "problem": f"<image>{problem.messages[0].text}",
        "answer": problem.answer,
        "images": [{"sha256": image.sha256, "width": image.width, "height": image.height}],
        "metadata": dict(problem.metadata),
    }
