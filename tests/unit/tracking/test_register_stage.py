"""The register stage as a whole: files in, registered.json, registry and report out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from polyturn import layout
from polyturn.params import Params, TrackingParams
from polyturn.tracking import open_run
from tasks.context import StageContext
from tasks.register import register
from tests.unit.fake_run import make_run
from tests.unit.tracking.stored import stored_runs

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path, template_store: Path) -> Path:
    root = make_run(tmp_path / "checkout")
    (root / layout.REGISTERED).unlink()
    shutil.copy(REPOSITORY / layout.DVC_YAML, root)
    (root / "mlflow.db").write_bytes(template_store.read_bytes())
    return root


def test_the_policy_is_registered_and_the_report_shows_it(checkout: Path):
    flow = {"prefect.flow_run_id": "f-1", "prefect.flow_run_name": "shy-owl"}
    quiet = TrackingParams(system_metrics_s=0)
    with open_run(quiet, root=checkout, name="shy-owl", tags=flow) as parent:
        result = subprocess.run(
            [sys.executable, "-m", "tasks.register"],
            cwd=checkout,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "POLYTURN_PARENT_RUN_ID": parent.run_id,
                "POLYTURN_USER": "alice",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    assert json.loads((checkout / layout.REGISTERED).read_text()) == {
        "name": "polyturn-geo3k",
        "version": 1,
        "alias": "champion",
        "reason": "there was no champion",
    }
    assert "polyturn-geo3k version 1" in (checkout / layout.REPORT).read_text()
    uri = f"sqlite:///{checkout}/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)  # not the one an earlier test has set
    version = client.get_model_version_by_alias("polyturn-geo3k", "champion")
    scores = json.loads((checkout / layout.METRICS).read_text())["test"]["policy"]["sampled"]
    assert float(version.tags["accuracy"]) == scores["accuracy"]
    assert float(version.tags["pass_at_2"]) == scores["pass@2"]
    assert {len(version.tags[key]) for key in ("params.digest", "dvc.lock.digest")} == {64}
    assert version.tags["prefect.flow_run_id"] == "f-1"
    assert version.tags["dvc.experiment"] == "shy-owl"
    assert version.tags["mlflow.parentRunId"] == parent.run_id
    assert version.tags["user"] in ("alice", parent.tags()["mlflow.user"])
    assert (version.tags["external"], len(version.tags["policy.digest"])) == ("false", 64)
    (run,) = [r for r in stored_runs(checkout) if r.info.run_name == "register"]
    for run_id in (run.info.run_id, parent.run_id):
        assert [f.path for f in client.list_artifacts(run_id, "report")] == ["report/report.html"]
    assert run.info.status == "FINISHED"
    assert run.inputs.dataset_inputs[0].dataset.name == "policy"
    experiment = [run.info.experiment_id]
    traced = client.search_traces(locations=experiment)
    assert {trace.info.trace_metadata["mlflow.sourceRun"] for trace in traced} == {run.info.run_id}
    assert {trace.info.tags["policy"] for trace in traced} == {"warm start", "after training"}
    assert run.data.tags["registered"] == "models:/polyturn-geo3k/1"


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (layout.METRICS, "{}", r"no test\.policy\.sampled\.accuracy; run dvc repro evaluate"),
        (layout.METRICS, "[]", "must hold an object"),
        (layout.METRICS, None, r"metrics\.json cannot be read"),
        (layout.TRAIN_RUN, "{}", r"train_run\.json has no 'run_id'; run dvc repro train"),
    ],
)
def test_a_missing_score_is_named_and_no_version_is_made(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    content: str | None,
    message: str,
):
    (checkout / path).write_text(content) if content else (checkout / path).unlink()
    monkeypatch.chdir(checkout)
    refused = pytest.raises(ValueError, match=message)
    with refused, open_run(TrackingParams(), root=checkout, name="register") as run:
        register(StageContext("register", Params(), run, checkout))
    assert not (checkout / layout.REGISTERED).exists()
    assert run.store.client.search_registered_models() == []
    assert [stored.info.status for stored in stored_runs(checkout)] == ["FAILED"]
