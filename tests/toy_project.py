"""A throw-away checkout: the real polyturn, tasks and flows, with stages whose bodies a test writes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

_STAGE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from polyturn.progress import Progress
from tasks.context import StageContext, run_stage

def body(ctx: StageContext) -> None:
    out = Path("artifacts/{name}")
{body}
    out.mkdir(parents=True)
    (out / "done").write_text("{name}")

if __name__ == "__main__":
    run_stage("{name}", body)
"""
FLOW = (sys.executable, "-m", "flows.pipeline")
_GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]


@dataclass(frozen=True)
class ToyProject:
    """A git repository at `path` with a chain of stages, each depending on `data.txt` and the one before it."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, source: Path, bodies: Mapping[str, str]) -> ToyProject:
        """Copy the code of `source`, and write one stage per body (Python statements; `ctx` and `out` are known)."""
        path.mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__")
        for name in ("polyturn", "flows", "recipes", "scripts"):
            if (source / name).is_dir():
                shutil.copytree(source / name, path / name, ignore=ignore)
        (path / "tasks").mkdir()
        real_stages = yaml.safe_load((source / "dvc.yaml").read_text())["stages"]
        for file in (source / "tasks").glob("*.py"):
            if file.stem not in real_stages:
                shutil.copy(file, path / "tasks")
        for name in ("params.yaml", ".gitignore", ".dvcignore", "prefect.yaml", "pyproject.toml"):
            if (source / name).is_file():
                shutil.copy(source / name, path)
        shutil.copytree(
            source / ".dvc",
            path / ".dvc",
            ignore=lambda d, names: set(names) - {"config", ".gitignore"},
        )
        project = cls(path)
        project._write_stages(bodies)
        (path / "data.txt").write_text("data\n")
        (path / "mlflow.db").write_bytes(_empty_database())
        subprocess.run(["git", "init", "-q", "-b", "main"], cwd=path, check=True)
        project.commit()
        return project

    def _write_stages(self, bodies: Mapping[str, str]) -> None:
        stages: dict[str, object] = {}
        before = ["data.txt"]
        for name, body in bodies.items():
            text = _STAGE.format(name=name, body=textwrap.indent(textwrap.dedent(body), "    "))
            (self.path / "tasks" / f"{name}.py").write_text(text)
            stages[name] = {
                "cmd": f"python -m tasks.{name}",
                "deps": [*before, f"tasks/{name}.py"],
                "params": ["seed", "train"],
                "outs": [f"artifacts/{name}"],
            }
            before = [f"artifacts/{name}"]
        (self.path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))

    def commit(self) -> None:
        """Commit everything."""
        subprocess.run([*_GIT, "add", "."], cwd=self.path, check=True)
        subprocess.run([*_GIT, "commit", "-q", "-m", "test"], cwd=self.path, check=True)

    def git(self, *arguments: str) -> str:
        """Output of a git command."""
        return subprocess.check_output(["git", *arguments], cwd=self.path, text=True).strip()

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own; `python` and `dvc` are those of the tests."""
        # other tests in this process may have told MLflow of their store
        inherited = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
        return subprocess.Popen(
            command,
            cwd=self.path,
            # `import flows` names the home of the checkout under test, whose runs are none of the toy's
            env={**inherited, "PREFECT_HOME": str(self.path / ".prefect"), "GIT_CONFIG_COUNT": "2",
                 "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "test",
                 "GIT_CONFIG_KEY_1": "user.email", "GIT_CONFIG_VALUE_1": "test@example.org", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stdout holds stderr too."""
        process = self.start(*command, **env)
        output, _ = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, output)

    def stage(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run one stage without dvc."""
        return self.run(sys.executable, "-m", f"tasks.{name}")

    def status(self, name: str) -> dict[str, object]:
        """What the stage's status file says."""
        return json.loads((self.path / ".polyturn" / "status" / f"{name}.json").read_text())

    def runs(self) -> dict[str, list[str]]:
        """MLflow statuses by run name, in order of start."""
        query = "SELECT name, status, end_time FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
        found: dict[str, list[str]] = {}
        # Not through MLflow's client: it takes seconds to load, and keeps a database open that a test may move.
        with closing(sqlite3.connect(self.path / "mlflow.db", timeout=30)) as database:
            for name, status, ended in database.execute(query):
                found.setdefault(name, []).append(status if ended else f"{status} (open)")
        return found


@cache
def _empty_database() -> bytes:
    """MLflow's tables without a run: to make them takes as long as a whole toy stage."""
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
    with TemporaryDirectory() as directory:
        path = Path(directory) / "mlflow.db"
        command = [sys.executable, "-c", code, f"sqlite:///{path}"]
        subprocess.run(command, check=True, capture_output=True)
        return path.read_bytes()


Toy = Callable[..., ToyProject]  # the fixture `toy`


def wait_until(
    condition: Callable[[], bool],
    *,
    seconds: float = 60,
    process: subprocess.Popen[str] | None = None,
) -> None:
    """Poll until `condition()` holds; fail the test after `seconds`, or with what `process` printed once it has ended."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}:\n{process.communicate()[0]}")
        time.sleep(0.1)
