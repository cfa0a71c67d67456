"""SGLang servers that polyturn starts: command, free port, log, readiness, and an end without orphans."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyturn import die_with_parent
from polyturn.params import SglangParams
from polyturn.processes import group_is_alive
from polyturn.sampler.sglang.control import Control, ServerError

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_LAST_PORT = 65_535 - 10_000  # the server's gRPC port is 10000 above its HTTP port
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LOG_TAIL = 2000  # characters of the log in an error
# The server keeps the ids that it is sent (else it decodes and tokenizes again), and keeps no picture embeddings
# under keys of its own, which would outlive an update of the vision tower. It leaves the last position of its context
# empty, and so is given one more than a trajectory has, be it one more than the model has. Over several GPUs it starts
# although the trainer has taken more of one of them.
ENVIRONMENT = {
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# What NCCL does where nobody says anything. SGLang says 0 to both, and a group whose members see memory in different ways
# fails or hangs (NovaSky-AI/SkyRL pull request 143 has the error).
_NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """What one server is started with.

    Attributes:
        model: Hugging Face directory of the policy.
        dtype: of weights and activations, such as bfloat16.
        context_length: most tokens of a trajectory.
        gpus: indices of the GPUs it runs on.
        log: file that takes its output.
    """

    model: Path
    dtype: str
    context_length: int
    gpus: Sequence[int]
    log: Path


def command(launch: Launch, params: SglangParams, *, seed: int, port: int) -> list[str]:
    """The command line of one server."""
    flags: list[str] = [
        *("--model-path", str(launch.model)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", launch.dtype),
        *("--context-length", str(launch.context_length)),
        *("--tp-size", str(params.tensor_parallel)),
        *("--base-gpu-id", str(launch.gpus[0])),
        *("--mem-fraction-static", str(params.memory_fraction)),
        *("--random-seed", str(seed)),
        *("--attention-backend", params.attention_backend),
        *("--mm-attention-backend", params.vision_attention_backend),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "none"),
        *("--cuda-graph-backend-prefill", "disabled"),
        "--skip-server-warmup",
    ]
    if params.deterministic:
        flags.append("--enable-deterministic-inference")
    if params.release_memory:
        flags.append("--enable-memory-saver")
    return [sys.executable, "-m", "sglang.launch_server", *flags, *params.extra_flags]


@dataclass
class ServerProcess:
    """One running server; `close` ends its whole process group."""

    control: Control
    popen: subprocess.Popen[bytes]
    log: Path
    _is_closed: bool = field(default=False)

    @property
    def is_running(self) -> bool:
        """Whether the launcher lives; the kernel reports its end at once, /health only after seconds."""
        return self.popen.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when /health answers.

        Raises:
            ServerError: it died or did not answer in time; the end of its log is in the message.
        """
        deadline = time.monotonic() + timeout_s
        while not self.control.is_healthy():
            if not self.is_running:
                raise ServerError(
                    f"the SGLang server ended with status {self.popen.returncode}; {self._tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the SGLang server did not answer within sampler.sglang.start_timeout_s "
                    f"{timeout_s:.0f}; {self._tail()}"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the server and everything it started: SIGTERM, then SIGKILL to its process group."""
        if self._is_closed:
            return
        self._is_closed = True
        group = self.popen.pid
        for sign, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            if not group_is_alive(group):
                break
            try:
                os.killpg(group, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience_s
            while group_is_alive(group) and time.monotonic() < deadline:
                self.popen.poll()
                time.sleep(0.1)
        try:
            self.popen.wait(_GRACE_S)
        except subprocess.TimeoutExpired:  # inside a driver, where no signal reaches it
            logger.error("SGLang server %d does not end, its GPU stays taken", group)

    def _tail(self) -> str:
        try:
            text = self.log.read_text(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
        return f"the end of its log {self.log}:\n{text[-_LOG_TAIL:]}"


def environment(params: SglangParams) -> dict[str, str]:
    """What the servers' environment holds beside this process's own."""
    uses_ipc = params.picture_transport == "cuda_ipc"
    shared = {}
    if params.weight_update == "distributed":
        shared = {name: os.environ.get(name, default) for name, default in _NCCL_DEFAULTS.items()}
    return {**ENVIRONMENT, "SGLANG_USE_CUDA_IPC_TRANSPORT": str(int(uses_ipc)), **shared}


def start(
    argv: Sequence[str], control: Control, log: Path, env: Mapping[str, str] = ENVIRONMENT
) -> ServerProcess:
    """Start a server as the leader of a process group that dies with this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        popen = subprocess.Popen(
            die_with_parent.command(argv),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**_inherited(), **env},
            start_new_session=True,
        )
    logger.info("SGLang server %d at %s, log %s", popen.pid, control.url, log)
    return ServerProcess(control, popen, log)


def _inherited() -> dict[str, str]:
    """This process's environment without its place among ranks: torch would look for the server's at torchrun's agent."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }


def free_port() -> int:
    """A port that nobody listens on now, low enough for the further ones that the server counts up from it."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        if port <= _LAST_PORT:
            return port
