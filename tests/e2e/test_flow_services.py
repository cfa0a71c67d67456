"""The server and worker that `make services` starts: deployments run there, and runs outlast outages or are told lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from polyturn import processes
from tests.ports import answers_at, free_ports
from tests.toy_project import Toy, wait_until

pytestmark = pytest.mark.slow(minutes=2)
SERVICES = (sys.executable, "scripts/services.py")


def test_a_port_in_use_is_named(toy: Toy) -> None:
    project = toy(one="pass")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = project.run(*SERVICES, "start", "--port", str(port))
    assert result.returncode == 2
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"error: port {port} is in use")
    assert f"PORT={port + 1}" in line


def test_a_deployment_runs_on_the_worker_that_services_start(toy: Toy, tmp_path: Path) -> None:
    project = toy(one="pass")
    (port,) = free_ports(1)
    try:
        up = project.run(*SERVICES, "start", "--port", str(port))
        assert up.returncode == 0, up.stdout
        command = ("prefect", "deployment", "run", "pipeline/cpu-demo", "--watch")
        done = project.run(*command, "-p", 'overrides={"seed": 9}')
        assert "finished successfully" in done.stdout, done.stdout
        assert list((project.path / "runs").glob("*/report.html"))
        assert project.run(*SERVICES, "start", "--port", str(port + 1)).returncode == 0
        assert answers_at(port), "a server that runs keeps its port"
    finally:
        down = project.run(*SERVICES, "stop")
    assert "server (pid" in down.stdout
    assert "worker (pid" in down.stdout
    assert not answers_at(port)


def test_services_are_not_ended_under_a_run_and_a_lost_run_is_no_run(toy: Toy) -> None:
    """PrefectHQ/prefect#16746, #18257: a run whose worker is gone stays Running for ever."""
    project = toy(one='Path("started").touch(); time.sleep(120)')
    state = project.path / ".polyturn"
    (port,) = free_ports(1)
    run = ("prefect", "deployment", "run", "pipeline/cpu-demo", "--flow-run-name")
    try:
        assert project.run(*SERVICES, "start", "--port", str(port)).returncode == 0
        assert project.run(*run, "first").returncode == 0
        wait_until((state / "worktrees/first/started").exists, seconds=60)
        refused = project.run(*SERVICES, "stop")
        assert refused.returncode == 2
        (line,) = refused.stdout.splitlines()
        assert line.startswith("error: at work: first; wait for their end")
        for name in ("worker", "server"):  # the machine goes down
            text = (state / f"services/{name}.pid").read_text()
            os.killpg(processes.parse(text).pid, signal.SIGKILL)
        os.kill(json.loads((state / "locks/first.lock").read_text())["pid"], signal.SIGKILL)
        up = project.run(*SERVICES, "start", "--port", str(port))
        assert "marked Crashed, as their processes are gone: first" in up.stdout
        assert project.run(*run, "second").returncode == 0
        wait_until((state / "worktrees/second/started").exists, seconds=60)
        forced = project.run(*SERVICES, "stop", "--force")
        assert forced.returncode == 0
        assert forced.stdout.splitlines()[0] == "cancelling second"
        with closing(sqlite3.connect(project.path / ".prefect/prefect.db")) as database:
            found = dict(database.execute("SELECT name, state_type FROM flow_run"))
        assert found == {"first": "CRASHED", "second": "CANCELLED"}
        assert {state for ended in project.runs().values() for state in ended} == {"KILLED"}
    finally:
        project.run(*SERVICES, "stop", "--force")


@pytest.mark.full
def test_an_outage_of_the_server_neither_ends_a_run_nor_keeps_it_from_being_cancelled(
    toy: Toy,
) -> None:
    """PrefectHQ/prefect#8080, #17482: runs crash with the server's hiccups, and go on though they are cancelled.

    The server is away for longer than Prefect's client waits (62 s), and than its watch of cancelled runs.
    """
    body = """
    (Path("../../..") / ctx.name).touch()
    progress = Progress(10_000, ctx.name)
    for _ in range(900 if ctx.name == "one" else 10_000):
        progress.update()
        time.sleep(0.1)
    """
    project = toy(one=body, two=body)
    (port,) = free_ports(1)
    state = project.path / ".polyturn"
    try:
        assert project.run(*SERVICES, "start", "--port", str(port)).returncode == 0
        run = project.run("prefect", "deployment", "run", "pipeline/cpu-demo")
        run_id = re.findall(r"flow-run/([0-9a-f-]{36})", run.stdout)[-1]
        wait_until((project.path / "one").exists, seconds=60)
        os.killpg(processes.parse((state / "services/server.pid").read_text()).pid, signal.SIGKILL)
        time.sleep(75)
        assert project.run(*SERVICES, "start", "--port", str(port)).returncode == 0
        wait_until((project.path / "two").exists, seconds=120)
        project.run("prefect", "flow-run", "cancel", run_id)

        def is_cancelled() -> bool:
            with closing(sqlite3.connect(project.path / ".prefect/prefect.db")) as database:
                return list(database.execute("SELECT state_type FROM flow_run")) == [("CANCELLED",)]

        wait_until(is_cancelled, seconds=60)
        runs = project.runs()
        assert runs.pop("one") == ["FINISHED"]
        assert [*runs.values()] == [["KILLED"], ["KILLED"]], (
            "the second stage and the run around them"
        )
    finally:
        project.run(*SERVICES, "stop", "--force")
