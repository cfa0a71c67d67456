"""Where the stage train works: a place that cannot be made is named with its key."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import yaml

from polyturn.params import parse
from polyturn.tracking import Run
from tasks.context import StageContext
from tasks.place import occupy

STAGE = {"train": {"deps": [], "params": ["seed", "train"]}}


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one stage, to work in."""
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": STAGE}))
    return tmp_path / "checkout"


def context(**train: object) -> StageContext:
    return StageContext("train", parse({"train": train}), cast("Run", None), Path("stage"))


@pytest.mark.parametrize(("below", "why"), [("", "File exists"), ("more", "Not a directory")])
def test_a_work_uri_that_is_no_directory_is_named(tmp_path: Path, below: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    ctx = context(work_uri=str(tmp_path / "file" / below))
    with pytest.raises(ValueError, match=rf"train\.work_uri must be a directory .*file.*: {why}"):
        occupy(ctx)


@pytest.mark.parametrize("uri", ["", "shared", "{tmp_path}/shared", "~/shared"])
def test_work_lies_below_the_uri_and_goes_once_the_outputs_are_accepted(
    checkout: Path, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = uri.format(tmp_path=tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ctx = context(work_uri=uri)
    with ctx.held:
        place = occupy(ctx)
        below = checkout / uri.replace("~", str(tmp_path / "home")) if uri else Path("stage")
        expected = below / place.directory.name
        assert place.directory == expected
        (place.directory / "file").write_text("")
        for cleanup in ctx.cleanups:
            cleanup()
    assert not expected.exists()
