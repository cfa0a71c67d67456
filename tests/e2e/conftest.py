"""What the end-to-end tests share: a Prefect server, and a checkout in which a policy was trained."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyturn import layout
from polyturn.pipeline import workspace
from tests.e2e.training import CHANGES, PARITY, Outputs, outputs
from tests.ports import answers_at, free_ports
from tests.toy_project import ToyProject, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Prefect server for the tests of a file: its address and home."""
    (port,) = free_ports(1)
    home = tmp_path_factory.mktemp("prefect")
    env = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
        )
    wait_until(lambda: answers_at(port), seconds=120)
    yield env
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """A copy of the checkout with the tiny recipe, warm started, and trained once without a disturbance."""
    root = Path(__file__).resolve().parents[2]
    path = tmp_path_factory.mktemp("resume") / "checkout"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).splitlines():
        if (root / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, path / name)
    (path / "plugins" / "parity.py").write_text(PARITY)
    tiny = workspace.compose(path, recipe="tiny", overrides={}).changes
    workspace.write_params(path, tiny)
    workspace.write_params(path, CHANGES)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=path, check=True)
    project = ToyProject(path)
    project.commit()
    for name in ("fetch", "images", "model", "warmstart", "train"):
        result = project.stage(name)
        assert result.returncode == 0, result.stdout
    return project


@pytest.fixture(scope="session")
def undisturbed(ready: ToyProject, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The outputs of the first training."""
    return outputs(ready, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def project(ready: ToyProject, undisturbed: Outputs) -> Iterator[ToyProject]:
    """The checkout; params.yaml and the work directory are put back after the test."""
    text = (ready.path / layout.PARAMS).read_text()
    yield ready
    (ready.path / layout.PARAMS).write_text(text)
    shutil.rmtree(ready.path / ".polyturn" / "work", ignore_errors=True)
