"""The same runs and registration against a real MLflow server."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyturn.params import RegistryParams, TrackingParams
from polyturn.statistics import Interval
from polyturn.tracking import open_run
from polyturn.tracking.registry import Candidate, register


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--workers", "1"),
        *("--artifacts-destination", str(tmp_path / "artifacts")),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        log.close()


@pytest.mark.slow
def test_runs_and_the_registry_work_over_http(server: str, tmp_path: Path):
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    tracking = TrackingParams(uri=server)
    with open_run(tracking, root=tmp_path, name="register", stage="register") as run:
        run.log_metrics({"rollout/reward": 0.5}, 1)
        run.log_text("hello", "note.txt")
        entry = Candidate(policy, "set", Interval(0.5, 0.4, 0.6))
        assert register(run, entry, RegistryParams()).alias == "champion"
        assert register(run, entry, RegistryParams()).version == 1
    assert run.artifact_uri.startswith("mlflow-artifacts:/")
    assert urllib.request.urlopen(run.url).status == 200
    assert run.store.client.get_run(run.run_id).info.status == "FINISHED"
