"""What DVC, Prefect and MLflow cost: runs in which nothing happens, the frame around stages, imports.

python benchmarks/orchestration.py [--quick] [--demo-s SECONDS]

In a copy of this checkout whose seven stages have the real deps and params, run in the real frame (lease, MLflow run,
hashes of inputs) and write one file each: `dvc repro` and the flow on a running server when nothing has changed, and the
flow when every stage runs. What the latter takes, and what the demo's calls of MLflow take, is the overhead; the rest of a
run is work. Wall times are the best of some rounds; CPU seconds are those of the command and its children, which hardly
depend on what else the machine does. Aims: 3 s, 12 s and 5% of the demo on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment  # noqa: E402
from polyturn.params import TrackingParams  # noqa: E402

DEMO_S = 450.0  # of `make demo` on two quiet cores: six to nine minutes (README)
# Calls of the demo: a warm start of about 900 steps, and 40 steps of training with two traces each.
NUM_METRIC_CALLS, METRICS_PER_CALL, NUM_TRACES = 940, 20, 80
TRACE_S = 0.06  # tracking.traces_per_step says so
MODULES = (
    "polyturn.params", "polyturn.cli.commands", "tasks.context", "polyturn.reward", "flows.pipeline", "prefect", "mlflow",
    "dvc.repo", "transformers", "torch", "tasks.train",
)  # fmt: skip
_STAGE = """
import sys
from pathlib import Path
from tasks.context import run_stage

def body(ctx):
    out = Path("bench") / ctx.name
    out.mkdir(parents=True)
    (out / "done").write_text(str(ctx.params.seed))
    if ctx.name == "register":
        Path("registered.json").write_text('{"name": "bench", "version": "0", "alias": ""}')

run_stage(sys.argv[1], body)
"""
_GIT = ["git", "-c", "user.name=bench", "-c", "user.email=bench@example.org"]


@dataclass(frozen=True)
class Cost:
    """Of one command: wall and CPU seconds (its children included)."""

    wall_s: float
    cpu_s: float


def timed(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Cost:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed; its output is printed before.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        done.check_returncode()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, used)


def best(costs: Sequence[Cost]) -> Cost:
    """The least of each."""
    return Cost(min(c.wall_s for c in costs), min(c.cpu_s for c in costs))


def make_project(path: Path) -> None:
    """Copy the checkout's files; its stages keep command frame, code deps and params, and write one file each."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
    for name in ("dvc.lock", "metrics.json", "registered.json"):
        (path / name).unlink(missing_ok=True)
    graph = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    stages: dict[str, object] = {}
    before: list[str] = []
    for name, stage in graph["stages"].items():
        code = [dep for dep in stage["deps"] if dep.endswith(".py") or dep == "plugins"]
        stages[name] = {
            "cmd": f"python -m bench_stage {name}",
            "deps": [*before, *code],
            "params": stage["params"],
            "outs": [f"bench/{name}"],
        }
        before = [f"bench/{name}"]
    (path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    (path / "bench_stage.py").write_text(_STAGE)
    with (path / ".gitignore").open("a") as file:
        file.write("/bench/\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "bench"]):
        subprocess.run([*_GIT, *command], cwd=path, check=True)


@contextmanager
def prefect_server(home: Path, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A server on a free port; its address and home as variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    named = {**env, "PREFECT_HOME": str(home), "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    log = (home / "server.log").open("w")
    process = subprocess.Popen(command, env=named, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(240):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield named
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        log.close()


def tracking_seconds(directory: Path) -> float:
    """What the demo's calls of MLflow take on SQLite, from the cost of one of them; its traces as documented."""
    # MLflow and its database layer belong to the measurement's process alone.
    from polyturn.tracking import open_run  # noqa: PLC0415

    metrics = {f"area/metric_{index}": float(index) for index in range(METRICS_PER_CALL)}
    with open_run(TrackingParams(), root=directory, name="bench") as run:
        run.log_metrics(metrics, step=0)
        started = time.process_time()
        for step in range(1, 51):
            run.log_metrics(metrics, step=step)
        per_call = (time.process_time() - started) / 50
    return per_call * NUM_METRIC_CALLS + TRACE_S * NUM_TRACES


def import_costs(rounds: int, env: Mapping[str, str]) -> dict[str, Cost]:
    """Of each package's top module, in a process of its own, less what a bare interpreter takes."""
    bare = best([timed([sys.executable, "-c", ""], cwd=ROOT, env=env) for _ in range(rounds + 1)])
    found: dict[str, Cost] = {}
    for module in MODULES:
        command = [sys.executable, "-c", f"import {module}"]
        cost = best([timed(command, cwd=ROOT, env=env) for _ in range(rounds + 1)])
        found[module] = Cost(max(0.0, cost.wall_s - bare.wall_s), max(0.0, cost.cpu_s - bare.cpu_s))
    return found


def measure(directory: Path, rounds: int) -> dict[str, Cost]:
    """Costs by name, in a fresh project below `directory`."""
    path, home = directory / "project", directory / "prefect"
    path.mkdir()
    home.mkdir()
    make_project(path)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    repro = [sys.executable, "-m", "dvc", "repro"]
    flow = [sys.executable, "-m", "flows.pipeline"]
    costs = {"repro_all": timed(repro, cwd=path, env=env)}
    costs["noop_repro"] = best([timed(repro, cwd=path, env=env) for _ in range(rounds)])
    with prefect_server(home, env) as named:
        timed(flow, cwd=path, env=named)  # the server's first flow run sets its database up
        costs["noop_flow"] = best([timed(flow, cwd=path, env=named) for _ in range(rounds)])
        costs["flow_all"] = timed([*flow, "--set", "seed=1"], cwd=path, env=named)
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one table and one RESULT line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round each")
    parser.add_argument(
        "--demo-s", type=float, default=DEMO_S, help="seconds of the demo (%(default)g)"
    )
    options = parser.parse_args(arguments)
    environment.apply()
    rounds = 1 if options.quick else 5
    with TemporaryDirectory(prefix="polyturn-bench-") as name:
        costs = measure(Path(name), rounds)
        tracking_s = tracking_seconds(Path(name))
    imports = import_costs(rounds, os.environ)
    print(
        f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores; best of {rounds}"
    )
    print(f"{'what':<44} {'wall s':>8} {'CPU s':>8}")
    told = {
        "noop_repro": "dvc repro, nothing to do", "noop_flow": "flow on a server, nothing to do",
        "repro_all": "dvc repro, seven empty stages", "flow_all": "flow on a server, seven empty stages",
    }  # fmt: skip
    for key, what in told.items():
        print(f"{what:<44} {costs[key].wall_s:8.2f} {costs[key].cpu_s:8.2f}")
    print(f"{'MLflow calls of the demo':<44} {'':>8} {tracking_s:8.2f}")
    for module, cost in imports.items():
        print(f"{f'import {module}':<44} {cost.wall_s:8.2f} {cost.cpu_s:8.2f}")
    overhead_s = costs["flow_all"].cpu_s + tracking_s
    result = {
        "noop_repro_s": round(costs["noop_repro"].wall_s, 2),
        "noop_repro_cpu_s": round(costs["noop_repro"].cpu_s, 2),
        "noop_flow_s": round(costs["noop_flow"].wall_s, 2),
        "noop_flow_cpu_s": round(costs["noop_flow"].cpu_s, 2),
        "overhead_s": round(overhead_s, 2),
        "overhead_fraction": round(overhead_s / options.demo_s, 4),
        "load": round(os.getloadavg()[0], 1),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
