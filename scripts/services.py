"""Start or stop a Prefect server and a worker in the background (`make services`, `make services-stop`)."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment, processes  # noqa: E402 - the checkout need not be installed

STATE = ROOT / ".polyturn" / "services"
PROFILES = ROOT / ".prefect" / "profiles.toml"
POOL = "polyturn-cpu"
_START_S = 120.0
_STOP_S = 10.0


class ServicesError(ValueError):
    """The services cannot be started; the message says what to do."""


def start(port: int) -> None:
    """Start what is not running, register the deployments, and say how to use them.

    Raises:
        ServicesError: the port is taken, or a service does not come up.
    """
    url = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    os.environ["POLYTURN_ROOT"] = str(ROOT)
    if _running("server") is None:
        _check_port(port)
        _spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        _wait_for_server(url)
    PROFILES.parent.mkdir(exist_ok=True)
    PROFILES.write_text(f'active = "polyturn"\n\n[profiles.polyturn]\nPREFECT_API_URL = "{url}"\n')
    _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect("--no-prompt", "deploy", "--all")
    if _running("worker") is None:
        _spawn(
            "worker", "worker", "start", "--pool", POOL, "--name", f"{POOL}-{socket.gethostname()}"
        )
    print(f"Prefect server: {url.removesuffix('/api')}   logs: {STATE.relative_to(ROOT)}/")
    print("Start a run:    prefect deployment run 'pipeline/cpu-demo' --watch")
    print("With changes:   ... -p recipe=tiny -p 'overrides={\"train.steps\": 3}'")
    print("End both:       make services-stop")


def stop() -> None:
    """End worker and server, and what they started."""
    for name in ("worker", "server"):
        process = _running(name)
        if process is not None:
            _end_group(process.pid)
            print(f"{name} (pid {process.pid}) has ended")
        _pid_file(name).unlink(missing_ok=True)
    PROFILES.unlink(missing_ok=True)


def _pid_file(name: str) -> Path:
    return STATE / f"{name}.pid"


def _running(name: str) -> processes.Process | None:
    try:
        process = processes.parse(_pid_file(name).read_text())
    except FileNotFoundError:
        return None
    return process if process.is_alive else None


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ServicesError(
                f"port {port} is in use; end the program that listens there, or choose another: "
                f"make services PORT={port + 1}"
            ) from None


def _spawn(name: str, *arguments: str) -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process = processes.find(child.pid)
    if process is None:
        raise ServicesError(f"the {name} ended at once; see {STATE / f'{name}.log'}")
    _pid_file(name).write_text(str(process))


def _wait_for_server(url: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if _running("server") is None:
            raise ServicesError(f"the server ended at once; see {STATE / 'server.log'}")
        try:
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise ServicesError(
        f"the server did not answer within {_START_S:g} s; see {STATE / 'server.log'}"
    )


def _prefect(*arguments: str) -> None:
    command = [sys.executable, "-m", "prefect", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ServicesError(
            f"`prefect {' '.join(arguments)}` failed: {' '.join((result.stderr or result.stdout).split())}"
        )


def _end_group(group: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end:
            if not processes.group_is_alive(group):
                return
            time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("--port", type=int, default=4200)
    chosen = parser.parse_args(arguments)
    environment.apply(ROOT)
    try:
        if chosen.action == "start":
            start(chosen.port)
        else:
            stop()
    except ServicesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
