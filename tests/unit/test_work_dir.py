"""Where the stage train works: a place that cannot be made is named with its key."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from polyturn.params import parse
from polyturn.tracking import Run
from tasks.context import StageContext
from tasks.train import work_dir


@pytest.mark.parametrize(("below", "why"), [("", "File exists"), ("more", "Not a directory")])
def test_a_work_uri_that_is_no_directory_is_named(tmp_path: Path, below: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    params = parse({"train": {"work_uri": str(tmp_path / "file" / below)}})
    with pytest.raises(ValueError, match=rf"train\.work_uri must be a directory .*file.*: {why}"):
        work_dir(StageContext("train", params, cast("Run", None), tmp_path))
