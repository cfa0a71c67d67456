"""Start or stop a Prefect server and a worker in the background; or register with a server, and work for one.

`make services` and `make services-stop` are for one machine. A team has one server (PREFECT_API_URL): `deploy` registers
work pools, deployments and the automation for runs that fell silent; `worker` works for a pool in this checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment, processes  # noqa: E402 - the checkout need not be installed

STATE = ROOT / ".polyturn" / "services"
CPU = "polyturn-cpu"
PROFILES = ROOT / ".prefect" / "profiles.toml"
_PROFILE = "polyturn"
# A worker's processes say that they live, so that the server notices when they do not; new runs are asked for often.
_WORKER = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_WORKER_QUERY_SECONDS": "5",
    **environment.PREFECT_CLIENT,
}
_START_S = 120.0
_STOP_S = 10.0
_CANCEL_S = 30.0  # in which cancelled runs end


class ServicesError(ValueError):
    """The services cannot be started; the message says what to do."""


def start(port: int) -> None:
    """Start what is not running, register the deployments, and say how to use them.

    A server that runs already keeps its port. Runs that were lost with the last one are marked Crashed.

    Raises:
        ServicesError: the port is taken, or a service does not come up.
    """
    is_running = _running("server") is not None
    url = (_address() if is_running else None) or f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    if not is_running:
        _check_port(port)
        _spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        _wait_for_server(url)
    PROFILES.parent.mkdir(exist_ok=True)
    PROFILES.write_text(
        f'active = "{_PROFILE}"\n\n[profiles.{_PROFILE}]\nPREFECT_API_URL = "{url}"\n'
    )
    deploy()
    _crash_the_lost()
    if _running("worker") is None:
        os.environ.update(_worker_environment())
        _spawn(
            "worker", "worker", "start", "--pool", CPU, "--name", f"{CPU}-{socket.gethostname()}"
        )
    print(f"Prefect server: {url.removesuffix('/api')}   logs: {STATE.relative_to(ROOT)}/")
    print("Start a run:    prefect deployment run 'pipeline/cpu-demo' --watch")
    print("With changes:   ... -p recipe=tiny -p 'overrides={\"train.steps\": 3}'")
    print("End both:       make services-stop")


def deploy() -> None:
    """Make work pools and automations, and register the deployments of prefect.yaml.

    Raises:
        ServicesError: no server is named or it does not answer, or a deployment is refused.
    """
    # Prefect takes a second to import and reads its settings then
    from prefect.client.orchestration import get_client  # noqa: PLC0415

    from flows import automations  # noqa: PLC0415
    from scripts import work_pools  # noqa: PLC0415

    work_pools.make()
    with get_client(sync_client=True) as client:
        automations.put(client, [automations.crash_the_silent()])
    _prefect("--no-prompt", "deploy", "--all")


def work(pool: str, name: str | None) -> NoReturn:
    """Become a worker of `pool` that works in this checkout."""
    os.environ.update(_worker_environment())
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
    os.execv(sys.executable, [*command, "--name", name or f"{pool}-{socket.gethostname()}"])


def _worker_environment() -> dict[str, str]:
    """prefect.yaml sends a run to POLYTURN_ROOT; what the caller has set goes before the rest."""
    given = {key: os.environ.get(key, value) for key, value in _WORKER.items()}
    return {**given, "POLYTURN_ROOT": str(ROOT), "PYTHONPATH": str(ROOT)}


def stop(*, is_forced: bool = False) -> None:
    """End worker and server, and what they started; `is_forced` cancels the runs that are at work.

    Raises:
        ServicesError: runs are at work, and it is not forced.
    """
    if _running("server") is not None and (url := _address()):
        os.environ["PREFECT_API_URL"] = url
        _end_runs(is_forced=is_forced)
    for name in ("worker", "server"):
        process = _running(name)
        if process is not None:
            _end_group(process.pid)
            print(f"{name} (pid {process.pid}) has ended")
        _pid_file(name).unlink(missing_ok=True)
    PROFILES.unlink(missing_ok=True)


def _end_runs(*, is_forced: bool) -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - see `deploy`

    from flows import at_work  # noqa: PLC0415

    try:
        with get_client(sync_client=True) as client:
            runs = at_work.find(client)
            names = ", ".join(sorted(run.name for run in runs))
            if runs and not is_forced:
                raise ServicesError(
                    f"at work: {names}; wait for their end (`polyturn stop NAME` ends training after this step), or cancel "
                    "them: make services-stop FORCE=1"
                )
            if runs:
                print(f"cancelling {names}")
                at_work.cancel(client, runs, wait_s=_CANCEL_S)
    except httpx.HTTPError as error:
        print(f"the server does not answer ({error}): its runs are not looked at", file=sys.stderr)


def _crash_the_lost() -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - see `deploy`

    from flows import at_work  # noqa: PLC0415

    with get_client(sync_client=True) as client:
        if lost := at_work.crash_the_lost(client):
            print(f"marked Crashed, as their processes are gone: {', '.join(run.name for run in lost)}")  # fmt: skip


def _address() -> str | None:
    """PREFECT_API_URL of the server that `start` has started; None where nothing tells it."""
    try:
        profiles = tomllib.loads(PROFILES.read_text())["profiles"]
        return str(profiles[_PROFILE]["PREFECT_API_URL"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None


def _pid_file(name: str) -> Path:
    return STATE / f"{name}.pid"


def _running(name: str) -> processes.Process | None:
    try:
        process = processes.parse(_pid_file(name).read_text())
    except FileNotFoundError:
        return None
    return process if process.is_alive else None


def _check_named_server() -> None:
    url = os.environ.get("PREFECT_API_URL", "")
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=5).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServicesError(
            f"PREFECT_API_URL must name a Prefect server (http://HOST:4200/api), got {url!r}: {str(error).splitlines()[0]}"
        ) from None


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
    parser.add_argument("action", choices=("start", "stop", "deploy", "worker"))
    parser.add_argument("--port", type=int, default=4200, help="start: of the server")
    parser.add_argument("--pool", default=CPU, help="worker: the pool to work for (%(default)s)")
    parser.add_argument("--name", help="worker: its name (pool and host)")
    parser.add_argument(
        "--force", action="store_true", help="stop: cancel the runs that are at work"
    )
    chosen = parser.parse_args(arguments)
    environment.apply(ROOT)
    try:
        if chosen.action == "start":
            start(chosen.port)
        elif chosen.action == "stop":
            stop(is_forced=chosen.force)
        else:
            _check_named_server()
            deploy() if chosen.action == "deploy" else work(chosen.pool, chosen.name)
    except ServicesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
