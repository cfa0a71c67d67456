"""MLflow is killed for two minutes in mid-training: nothing stops, and nothing is lost."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e_team.team import Team
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=5)
STEPS = 160
OUTAGE_S = 120.0
REWARD = "rollout/raw_reward"
OVERRIDES = {
    "train.steps": STEPS,
    "learner.decay_steps": STEPS,
    "train.eval_every": STEPS,
    "train.checkpoint_every": STEPS,
    "tracking.system_metrics_s": 1,
    "tracking.traces_per_step": 1,
    "seed": 7,
}


def history(team: Team, run_id: str, metric: str) -> list[tuple[int, float]]:
    """(step, Unix time) of every point, in the order of the server."""
    url = f"{team.mlflow_url}/api/2.0/mlflow/metrics/get-history"
    query = {"run_id": run_id, "metric_key": metric, "max_results": 10_000}
    found = httpx.get(url, params=query, timeout=30).json().get("metrics", [])
    return [(int(point["step"]), int(point["timestamp"]) / 1000) for point in found]


@pytest.fixture(scope="module")
def outage(team: Team, alice: ToyProject) -> tuple[str, float, float]:
    """The name of a run whose MLflow server was away, and from when until when."""
    run_id = team.submit("pipeline/cpu-demo", "outage", owner="alice", overrides=OVERRIDES)

    def has_begun() -> bool:
        runs = team.mlflow_runs("outage")
        return "train" in runs and REWARD in runs["train"]["metrics"]

    wait_until(has_begun, seconds=300)
    team.mlflow.kill()
    began = time.time()
    time.sleep(OUTAGE_S)
    team.mlflow.start()
    ended = time.time()
    found = team.wait(run_id, seconds=900)
    log = team.logs(run_id)
    assert found.state == "COMPLETED", log
    assert "does not answer" in log, "the outage is told"
    assert log.count("kept in") <= 4, "once by each process, not at every step"
    return "outage", began, ended


def test_every_run_ends_well(team: Team, outage: tuple[str, float, float]) -> None:
    runs = team.mlflow_runs(outage[0])
    assert set(runs) >= {"pipeline", "train", "evaluate", "register"}
    assert {stage: run["status"] for stage, run in runs.items()} == dict.fromkeys(runs, "FINISHED")


def test_every_step_is_there_once_with_its_first_time(
    team: Team, outage: tuple[str, float, float]
) -> None:
    name, began, ended = outage
    points = history(team, team.mlflow_runs(name)["train"]["id"], REWARD)
    assert [step for step, _ in points] == list(range(STEPS))
    times = [at for _, at in points]
    assert times == sorted(times)
    meanwhile = [at for at in times if began + 2 < at < ended - 2]
    assert len(meanwhile) > 5, "training went on, and its points have the time of their steps"
    samples = history(
        team, team.mlflow_runs(name)["train"]["id"], "system/cpu_utilization_percentage"
    )
    assert [step for step, _ in samples] == list(range(len(samples)))
    assert sum(began + 2 < at < ended - 2 for _, at in samples) > 5


def test_nothing_waits_any_more_and_files_are_on_s3(
    team: Team, alice: ToyProject, outage: tuple[str, float, float]
) -> None:
    left = alice.path / ".polyturn" / "outbox"
    assert not left.exists() or not list(left.iterdir())
    run_id = team.mlflow_runs(outage[0])["train"]["id"]
    url = f"{team.mlflow_url}/api/2.0/mlflow/artifacts/list"
    listed = httpx.get(url, params={"run_id": run_id}, timeout=30).json()
    assert listed["root_uri"].startswith("s3://"), "uploads do not go through the server"
    names = {item["path"] for item in listed["files"]}
    assert {"environment", "trajectories"} <= names
