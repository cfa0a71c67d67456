"""`polyturn stop` for a run on another machine: the tag that is set, and the run that sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.cli import commands as cli
from polyturn.params import TrackingParams
from polyturn.tracking import stop_tag
from polyturn.tracking.run import Run, open_run
from polyturn.tracking.store import TrackingError
from polyturn.training import stop_request
from polyturn.training.stop_request import NoRunError
from tests.toy_project import wait_until

TRACKING = TrackingParams(uri="sqlite:///mlflow.db", system_metrics_s=0)


def train(pipeline: Run, root: Path) -> None:
    """Begin what a train stage nested in `pipeline` does, and wait until it hears of a request."""
    work = root / "elsewhere" / "work"
    work.mkdir(parents=True)
    with open_run(TRACKING, root=root, name="train", parent_run_id=pipeline.run_id) as stage:
        stop_tag.watch(stage, work, every_s=0.05)
        wait_until(lambda: stop_request.reason(work) is not None, seconds=20)
    assert stop_request.reason(work) == "requested by polyturn stop of alice"


@pytest.mark.parametrize("by_name", [True, False])
def test_a_request_reaches_a_run_that_trains_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by_name: bool,
) -> None:
    monkeypatch.setenv("POLYTURN_USER", "alice")
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("tracking: {uri: 'sqlite:///mlflow.db'}\n")
    tags = {"prefect.flow_run_name": "polite-otter"}
    with open_run(TRACKING, root=tmp_path, name="polite-otter", tags=tags) as pipeline:
        name = "polite-otter" if by_name else pipeline.run_id
        assert cli.main(["stop", name]) == 0
        assert pipeline.run_id in capsys.readouterr().out
        train(pipeline, tmp_path)
    with pytest.raises(NoRunError, match=r"no open run of .* 'polite-otter'"):
        stop_tag.ask("polite-otter", TRACKING, tmp_path)


def test_a_server_that_is_away_does_not_end_the_watch(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with open_run(TRACKING, root=tmp_path, name="train") as run:
        answers = iter([TimeoutError, None])

        def tags() -> dict[str, str]:
            if next(answers, None) is TimeoutError:
                raise TrackingError("away")
            return {stop_tag.TAG: "bob"}

        run.tags = tags  # type: ignore[method-assign]
        stop_tag.watch(run, work, every_s=0.05)
        wait_until(lambda: stop_request.reason(work) is not None, seconds=20)
