"""Runs and registration against a real MLflow server, which is killed and started again in between."""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyturn.params import TrackingParams
from polyturn.report.data import read_run
from polyturn.tracking import Run, TrackingError, open_run
from polyturn.tracking.traces import log_trajectories
from tests.unit.fake_run import make_run
from tests.unit.tracking.mlflow_server import MlflowServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    running = MlflowServer.on_a_free_port(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.kill()


def log_step(run: Run, step: int) -> None:
    run.log_metrics({"rollout/reward": step / 10}, step, at_ms=1_700_000_000_000 + step)


def points(run: Run) -> list[tuple[int, float, int]]:
    history = run.store.client.get_metric_history(run.run_id, "rollout/reward")
    return [(m.step, m.value, m.timestamp - 1_700_000_000_000) for m in history]


def test_an_outage_loses_nothing_and_stops_nothing(server: MlflowServer, tmp_path: Path) -> None:
    """Metrics with their first times and no doubles, params, tags, files, traces and the end of the run."""
    entry = read_run(make_run(tmp_path / "run")).exhibits.after[0]
    note = tmp_path / "note.txt"
    tracking = TrackingParams(uri=server.address, system_metrics_s=0.2)
    with open_run(tracking, root=tmp_path, name="train", stage="train") as run:
        for step in range(3):
            log_step(run, step)
        server.kill()
        started = time.monotonic()
        for step in range(2, 8):  # step 2 once more, as after a resume
            log_step(run, step)
        run.log_params({"late": {"param": 1}})
        run.set_tags({"late": "tag"})
        run.log_dataset("problems", "artifacts/problems", "0" * 32 + ".dir")
        note.write_text("of the outage")
        run.log_artifact(note)
        note.write_text("later")
        log_trajectories(run, [(entry, "policy")], lambda sha: None)
        assert time.monotonic() - started < 10
        assert run.outbox.is_waiting
        server.start()
        log_step(run, 8)
    assert list((tmp_path / ".polyturn/outbox").iterdir()) == []
    assert points(run) == [(step, step / 10, step) for step in range(9)]
    stored = run.store.client.get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["late.param"] == "1"
    assert stored.data.tags["late"] == "tag"
    assert stored.inputs.dataset_inputs[0].dataset.digest == "0" * 32 + ".dir"
    assert run.artifact_uri.startswith("mlflow-artifacts:/")
    path = run.store.client.download_artifacts(run.run_id, "note.txt", str(tmp_path))
    assert Path(path).read_text() == "of the outage"
    (trace,) = run.store.client.search_traces(
        locations=[run.store.experiment_id], run_id=run.run_id
    )
    assert len(trace.data.spans) > len(entry["turns"])
    assert [a.value for a in trace.info.assessments] == [entry["reward"]]
    samples = run.store.client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    assert [sample.step for sample in samples] == list(range(len(samples)))
    assert len(samples) > 10, "also of the outage"


def test_a_run_that_ends_in_an_outage_is_ended_by_the_next_start(
    server: MlflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = TrackingParams(uri=server.address, outage_s=0.5, system_metrics_s=0)
    failed = pytest.raises(ValueError, match="reward term failed")
    with failed, open_run(tracking, root=tmp_path, name="train") as run:
        log_step(run, 0)
        server.kill()
        log_step(run, 1)
        raise ValueError("reward term failed")
    assert "the next start of a stage delivers them" in caplog.text
    with (
        pytest.raises(TrackingError, match="does not answer"),
        open_run(tracking, root=tmp_path, name="evaluate"),
    ):
        pass
    (kept,) = (tmp_path / ".polyturn/outbox").glob("*.jsonl")
    assert [json.loads(line).get("kind") for line in kept.read_text().splitlines()] == [
        None, "metrics", "tags", "end",
    ]  # fmt: skip
    # This process still holds its file: what a dead one left is the same without the lock.
    shutil.copy(kept, kept.with_name(f"{run.run_id}-1-1-1.jsonl"))
    server.start()
    waiting = TrackingParams(uri=server.address, outage_s=30, system_metrics_s=0)
    with open_run(waiting, root=tmp_path, name="evaluate") as later:
        stored = later.store.client.get_run(run.run_id)
    assert (stored.info.status, stored.data.tags["error.class"]) == ("FAILED", "ValueError")
    assert points(run) == [(0, 0.0, 0), (1, 0.1, 1)]


def test_the_run_has_a_page(server: MlflowServer, tmp_path: Path) -> None:
    tracking = TrackingParams(uri=server.address, system_metrics_s=0)
    with open_run(tracking, root=tmp_path, name="register") as run:
        pass
    assert urllib.request.urlopen(run.url).status == 200
