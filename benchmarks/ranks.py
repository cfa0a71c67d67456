"""Starts the ranks of a benchmark as processes of this host, with the variables that torchrun would set."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environments(num_ranks: int) -> list[dict[str, str]]:
    """This process's environment for each of `num_ranks` ranks; that of a single process names no rank."""
    plain = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    plain["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), plain.get("PYTHONPATH", "")]))
    if num_ranks == 1:
        return [plain]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {**plain, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)
    ]


def run_together(
    processes: Sequence[tuple[Sequence[str], Mapping[str, str]]], patience_s: float
) -> list[int]:
    """Run commands side by side, each in its environment, and return their exit codes.

    The first that fails, or the end of patience, ends the others.
    """
    started = [subprocess.Popen(command, cwd=ROOT, env=env) for command, env in processes]
    until = time.monotonic() + patience_s
    try:
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started) or time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [process.returncode for process in started]
