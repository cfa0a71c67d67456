"""A team on one machine: its services, a shared git repository, checkouts as of several hosts, workers, runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from polyturn import layout, processes
from polyturn.pipeline import workspace
from polyturn.processes import Process
from tests.e2e_team import services
from tests.e2e_team.services import BUCKET, S3, Postgres, Service
from tests.toy_project import ToyProject, wait_until

CPU_POOL = "polyturn-cpu"
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
RUN_S = 420.0  # a run of all stages while other runs hold the cores
_OUTPUTS = (layout.DVC_LOCK, layout.METRICS, layout.REGISTERED)


@dataclass(frozen=True)
class FlowRun:
    """A run of a deployment as the server tells of it."""

    id: str
    name: str
    state: str
    message: str
    tags: Sequence[str]


@dataclass
class Team:
    """Everything a test needs; `start` makes one, `close` ends all that it started."""

    directory: Path
    source: Path  # the checkout under test
    postgres: Postgres
    s3: S3
    mlflow: Service
    mlflow_url: str
    prefect: Service
    prefect_url: str
    workers: list[Service] = field(default_factory=list[Service])

    @classmethod
    def start(cls, directory: Path, source: Path) -> Team:
        """Start the services (20 s) and make the shared repository of `source` with the tiny recipe."""
        postgres = services.postgres(["mlflow", "prefect"])
        s3 = services.s3(directory / "s3")
        mlflow, mlflow_url = services.mlflow(directory, postgres.url("psycopg2", "mlflow"), s3)
        prefect, prefect_url = services.prefect(directory, postgres.url("asyncpg", "prefect"))
        team = cls(directory, source, postgres, s3, mlflow, mlflow_url, prefect, prefect_url)
        for service in (mlflow, prefect):
            service.start(wait=False)
        team._make_origin()
        for service in (mlflow, prefect):
            service.wait()
        return team

    def close(self) -> None:
        """End workers and services; remove Postgres's directory."""
        for service in (*self.workers, self.prefect, self.mlflow, self.s3.service, self.postgres.service):  # fmt: skip
            service.stop()
        shutil.rmtree(self.postgres.directory, ignore_errors=True)

    @property
    def env(self) -> dict[str, str]:
        """For any process of the team; laid over the tests' own environment."""
        return {
            **self.s3.env,
            "PREFECT_API_URL": self.prefect_url,
            "PREFECT_HOME": str(self.directory / "prefect-home"),
            "POLYTURN_TRACKING_URI": self.mlflow_url,
            "MLFLOW_TRACKING_URI": self.mlflow_url,
        }

    # The repository ------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Path:
        """The bare repository that everybody clones."""
        return self.directory / "origin.git"

    def _make_origin(self) -> None:
        seed = self.directory / "seed"
        seed.mkdir()
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=self.source, text=True).splitlines():
            if (self.source / name).is_file() and Path(name) not in _OUTPUTS:
                (seed / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.source / name, seed / name)
        workspace.write_params(seed, workspace.compose(seed, recipe="tiny", overrides={}).changes)
        config = seed / ".dvc" / "config"
        remote = f"['remote \"team\"']\n    url = s3://{BUCKET}/dvc\n    endpointurl = {self.s3.endpoint}\n"
        config.write_text(
            config.read_text().replace("[core]\n", "[core]\n    remote = team\n") + remote
        )
        subprocess.run(["git", "init", "-q", "-b", "main"], cwd=seed, check=True)
        ToyProject(seed).commit()
        subprocess.run(["git", "clone", "-q", "--bare", str(seed), str(self.origin)], check=True)

    def checkout(self, name: str, *, branch: str = "main") -> ToyProject:
        """A clone of the shared repository, as on a host of its own (its own DVC cache and state)."""
        path = self.directory / "hosts" / name / "polyturn"
        path.parent.mkdir(parents=True, exist_ok=True)
        clone = ["git", "clone", "-q", "--branch", branch, str(self.origin), str(path)]
        subprocess.run(clone, check=True)
        for key, value in (("user.name", name), ("user.email", f"{name}@example.org")):
            subprocess.run(["git", "config", key, value], cwd=path, check=True)
        return ToyProject(path)

    # Prefect -------------------------------------------------------------------------------------------------

    def deploy(self, checkout: ToyProject) -> None:
        """Make the work pools and register the deployments of the checkout's prefect.yaml."""
        done = checkout.run(sys.executable, "scripts/services.py", "deploy", **self.env)
        assert done.returncode == 0, done.stdout

    def worker(
        self, checkout: ToyProject, *, pool: str = CPU_POOL, name: str = "", **env: str
    ) -> Service:
        """Start a worker on `pool` that works in `checkout`, as `scripts/services.py worker` does."""
        title = name or checkout.path.parent.name
        command = [sys.executable, "scripts/services.py", "worker", "--pool", pool, "--name", title]  # fmt: skip
        log = self.directory / f"worker-{title}.log"
        service = Service(
            title, command, log, lambda: self._is_online(pool, title), env={**self.env, **env}, cwd=checkout.path, stop_s=3.0
        )  # fmt: skip
        self.workers.append(service)
        service.start()
        return service

    def _is_online(self, pool: str, name: str) -> bool:
        found = self.api(f"work_pools/{pool}/workers/filter", {})
        return any(w["name"] == name and w["status"] == "ONLINE" for w in found)

    def api(self, path: str, body: object | None = None) -> Any:
        """GET (without a body) or POST; the answer's JSON."""
        url = f"{self.prefect_url}/{path}"
        answer = httpx.get(url, timeout=30) if body is None else httpx.post(url, json=body, timeout=30)  # fmt: skip
        assert answer.is_success, f"{url}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def submit(self, deployment: str, name: str, **parameters: object) -> str:
        """Ask for a run called `name` of `deployment` (flow/name); return its id."""
        found = self.api(f"deployments/name/{deployment}")
        body = {"name": name, "parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.api(f"deployments/{found['id']}/create_flow_run", body)["id"])

    def flow_run(self, run_id: str) -> FlowRun:
        """How a run stands."""
        found = self.api(f"flow_runs/{run_id}")
        state = found["state"] or {}
        return FlowRun(
            run_id, found["name"], state.get("type", ""), state.get("message") or "", found["tags"]
        )

    def wait(self, run_id: str, *states: str, seconds: float = RUN_S) -> FlowRun:
        """Wait until the run has ended (or is in one of `states`); the log is shown if it takes too long."""
        wanted = frozenset(states) or FINAL
        try:
            wait_until(lambda: self.flow_run(run_id).state in wanted, seconds=seconds)
        except AssertionError:
            raise AssertionError(f"{self.flow_run(run_id)}\n{self.logs(run_id)}") from None
        return self.flow_run(run_id)

    def wait_for_line(self, run_id: str, text: str, *, seconds: float = RUN_S) -> None:
        """Wait until the run has logged a line with `text` in it."""
        end = time.monotonic() + seconds
        while text not in (log := self.logs(run_id)):
            ended = self.flow_run(run_id).state in FINAL
            assert not ended, f"the run ended without the line {text!r}\n{log}"
            assert time.monotonic() < end, f"no line {text!r} in {seconds:g} s\n{log}"
            time.sleep(0.5)

    def logs(self, run_id: str) -> str:
        """What the run has logged (the first 1000 lines)."""
        lines: list[str] = []
        for offset in range(0, 1000, 200):
            page = self.api(
                "logs/filter",
                {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200, "offset": offset, "sort": "TIMESTAMP_ASC"},
            )  # fmt: skip
            lines += [str(entry["message"]) for entry in page]
            if len(page) < 200:
                break
        return "\n".join(lines)

    def artifacts(self, run_id: str) -> dict[str, Any]:
        """The run's artifacts: key -> newest data."""
        body = {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "sort": "UPDATED_DESC"}
        found: dict[str, Any] = {}
        for artifact in self.api("artifacts/filter", body):
            found.setdefault(str(artifact["key"]), artifact["data"])
        return found

    # MLflow --------------------------------------------------------------------------------------------------

    def mlflow_runs(self, flow_run_name: str) -> dict[str, Mapping[str, Any]]:
        """The MLflow runs of a flow run: the pipeline's own as `pipeline`, the others by stage (newest each)."""
        found: dict[str, Mapping[str, Any]] = {}
        parents = self._search(f"tags.`prefect.flow_run_name` = '{flow_run_name}'")
        for parent in parents[:1]:
            found["pipeline"] = _record(parent)
            children = self._search(f"tags.`mlflow.parentRunId` = '{parent['info']['run_id']}'")
            for child in reversed(children):
                record = _record(child)
                found[record["tags"].get("stage", record["name"])] = record
        return found

    def mlflow_statuses(self, flow_run_name: str, stage: str) -> list[str]:
        """How the MLflow runs of a stage of a flow run ended, oldest first."""
        parent = self.mlflow_runs(flow_run_name)["pipeline"]["id"]
        wanted = f"tags.`mlflow.parentRunId` = '{parent}' and tags.stage = '{stage}'"
        return [run["info"]["status"] for run in reversed(self._search(wanted))]

    def _search(self, wanted: str) -> list[Any]:
        base = f"{self.mlflow_url}/api/2.0/mlflow"
        experiments = httpx.post(f"{base}/experiments/search", json={"max_results": 100}, timeout=30).json()  # fmt: skip
        ids = [item["experiment_id"] for item in experiments["experiments"]]
        body = {"experiment_ids": ids, "filter": wanted, "max_results": 100}
        answer = httpx.post(f"{base}/runs/search", json=body, timeout=30)
        assert answer.is_success, answer.text
        return answer.json().get("runs", [])


def _record(run: Mapping[str, Any]) -> dict[str, Any]:
    data = run["data"]
    return {
        "id": run["info"]["run_id"],
        "name": run["info"]["run_name"],
        "status": run["info"]["status"],
        "tags": {tag["key"]: tag["value"] for tag in data.get("tags", ())},
        "metrics": {m["key"]: m["value"] for m in data.get("metrics", ())},
    }


def host_processes(checkout: ToyProject) -> list[Process]:
    """The living processes of the host that `checkout` stands for: its worker, its runs, their stages and children."""
    return _with_variable(f"POLYTURN_ROOT={checkout.path}")


def run_processes(run_id: str) -> list[Process]:
    """The living processes of a flow run: its own, dvc, the stage, and theirs."""
    return _with_variable(f"PREFECT__FLOW_RUN_ID={run_id}")


def _with_variable(entry: str) -> list[Process]:
    found: list[Process] = []
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            variables = (directory / "environ").read_bytes().split(b"\0")
            if directory.name.isdigit() and entry.encode() in variables:
                process = processes.find(int(directory.name))
                found += [process] if process and process.is_alive else []
    return found


def lose(checkout: ToyProject) -> None:
    """What happens to a host: its processes end without a word, its disk is gone."""
    while alive := host_processes(checkout):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(checkout.path.parent)


def home_env(checkout: ToyProject) -> dict[str, str]:
    """The environment in which commands find the modules of a checkout, and not those under test."""
    return {"PYTHONPATH": str(checkout.path)}
