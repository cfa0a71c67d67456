"""`polyturn stop`: which run is asked, and that the run hears it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyturn import cli, lease, stop_request
from polyturn.stop_request import NoRunError, Running


@contextmanager
def training(root: Path, work: Path) -> Iterator[None]:
    """A train stage at work in checkout `root`, as far as the lease and the announcement tell."""
    with lease.hold(root / ".polyturn/work/train.lock", what="stage train", parent=None):
        work.mkdir(parents=True)
        stop_request.announce(Running(work, ["stage-run", "flow-run"]), root)
        yield


@pytest.mark.parametrize("name", ["directory", "stage-run", "flow-run"])
def test_a_run_is_asked_by_directory_or_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    work = tmp_path / "elsewhere" / "0123456789abcdef"
    monkeypatch.chdir(tmp_path)
    with training(tmp_path, work):
        assert stop_request.reason(work) is None
        assert cli.main(["stop", str(tmp_path) if name == "directory" else name]) == 0
        assert str(work) in capsys.readouterr().out
        assert stop_request.reason(work) == "requested by polyturn stop"


def test_without_a_name_the_run_of_this_checkout_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with training(tmp_path, tmp_path / "work"):
        assert cli.main(["stop"]) == 0
    assert stop_request.reason(tmp_path / "work") is not None


def test_a_run_that_is_not_running_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never started; of another name; ended (its lease is free, whatever files it left)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoRunError, match=r"no training run is running in .*got '\.'"):
        stop_request.ask(".")
    with (
        training(tmp_path, tmp_path / "work"),
        pytest.raises(NoRunError, match=r"is stage-run of flow-run, not 'other'"),
    ):
        stop_request.ask("other")
    assert cli.main(["stop", "stage-run"]) == 2
    assert "no training run is running" in capsys.readouterr().err
    assert stop_request.reason(tmp_path / "work") is None
