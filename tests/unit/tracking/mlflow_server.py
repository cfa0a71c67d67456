"""A real MLflow server that a test can kill and start again on the same port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class MlflowServer:
    """On SQLite below `directory`; artifacts go through it unless `artifact_root` (s3://...) is given."""

    directory: Path
    port: int
    artifact_root: str | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def on_a_free_port(cls, directory: Path, artifact_root: str | None = None) -> MlflowServer:
        """Not started yet."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return cls(directory, listener.getsockname()[1], artifact_root)

    @property
    def address(self) -> str:
        """Of its API and pages."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        places = (
            ("--no-serve-artifacts", "--default-artifact-root", self.artifact_root)
            if self.artifact_root
            else ("--artifacts-destination", str(self.directory / "artifacts"))
        )
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1", *places),
            *("--backend-store-uri", f"sqlite:///{self.directory}/server.db"),
            *self.options,
        ]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **self.environment,
        }
        with (self.directory / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(600):
            assert self.process.poll() is None, (self.directory / "server.log").read_text()
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL, workers included."""
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None
