"""`polyturn stop`: which run is asked, and that the run hears it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.cli import commands as cli
from polyturn.training import stop_request
from polyturn.training.stop_request import NoRunError, Running

ROOT = Path(__file__).resolve().parents[3]


def train_in(root: Path, work: Path) -> None:
    """What the train stage does in checkout `root`, as far as this process tells."""
    work.mkdir(parents=True)
    stop_request.announce(Running(work, ["stage-run", "flow-run"]), root)


@pytest.mark.parametrize("name", ["directory", "stage-run", "flow-run"])
def test_a_run_is_asked_by_directory_or_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    work = tmp_path / "elsewhere" / "0123456789abcdef"
    monkeypatch.chdir(tmp_path)
    train_in(tmp_path, work)
    assert stop_request.reason(work) is None
    assert cli.main(["stop", str(tmp_path) if name == "directory" else name]) == 0
    assert str(work) in capsys.readouterr().out
    assert stop_request.reason(work) == "requested by polyturn stop"


def test_without_a_name_the_run_of_this_checkout_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_in(tmp_path, tmp_path / "work")
    assert cli.main(["stop"]) == 0
    assert stop_request.reason(tmp_path / "work") is not None


def test_a_run_that_is_not_running_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never started, or of another name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoRunError, match=r"no training run is running in .*got '\.'"):
        stop_request.ask(".")
    train_in(tmp_path, tmp_path / "work")
    with pytest.raises(NoRunError, match=r"no run 'other' .*trains stage-run of flow-run"):
        stop_request.ask("other")
    assert stop_request.reason(tmp_path / "work") is None


def test_a_run_in_a_worktree_is_asked_by_the_name_of_its_flow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    works = {name: tmp_path / "work" / name for name in ("polite-otter", "bold-crow")}
    for name, work in works.items():
        train_in(tmp_path / ".polyturn/worktrees" / name, work)
    assert stop_request.ask("bold-crow") == works["bold-crow"]
    assert stop_request.reason(works["bold-crow"]) is not None
    assert stop_request.reason(works["polite-otter"]) is None


def test_a_run_that_has_ended_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its word is still there, and the next run of the checkout has not said its own yet."""
    monkeypatch.chdir(tmp_path)
    script = (
        "from pathlib import Path; from polyturn.training import stop_request as s; "
        "s.announce(s.Running(Path('work'), ['stage-run']))"
    )
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=path, check=True)
    assert (tmp_path / ".polyturn/work/train.json").exists()
    assert cli.main(["stop", "stage-run"]) == 2
    assert "no run 'stage-run' trains in" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
