"""The polyturn command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyturn import cli, params
from tests.toy_project import ToyProject


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


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in ("use", "plan", "report", "view", "grade"))


def test_viewing_what_is_not_there_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", "absent"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "absent" in line
    assert not (checkout / "runs").exists()


def test_plan_tells_what_is_stale_and_how_long_it_took(toy: Callable[..., ToyProject]) -> None:
    project = toy(one="pass", two="pass")
    assert project.run("dvc", "repro").returncode == 0
    (project.path / "tasks/two.py").write_text(
        (project.path / "tasks/two.py").read_text() + "\n# edited\n"
    )
    result = project.run("python", "-m", "polyturn.cli", "plan")
    assert result.returncode == 0
    assert "two:" in result.stdout
    assert "modified:           tasks/two.py" in result.stdout
    assert "one:" not in result.stdout
    times = result.stdout.partition("seconds that each stage took")[2]
    assert [line.split()[0] for line in times.splitlines()[1:]] == ["one", "two"]
