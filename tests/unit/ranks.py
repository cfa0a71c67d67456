"""Runs a function of a test module on several ranks, each a process of its own, and says what they returned or raised."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MAIN = """
import importlib, pickle, sys
from polyturn import world
module, name, out = sys.argv[1:]
function = getattr(importlib.import_module(module), name)
try:
    with world.joined() as here:
        outcome = function(here)
except Exception as error:
    outcome = error
with open(out, "wb") as file:
    pickle.dump(outcome, file)
"""


@dataclass(frozen=True)
class Rank:
    """What one rank returned (or the exception it raised; None if it died) and how it ended."""

    outcome: object
    exit_code: int
    output: str


def run(function: str, directory: Path, *, size: int = 2, timeout_s: float = 120) -> list[Rank]:
    """Run `module:function` as `function(world)` on every rank of a new world."""
    module, _, name = function.partition(":")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _MAIN, module, name, str(directory / f"rank{rank}.pickle")],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    ranks: list[Rank] = []
    for rank, process in enumerate(started):
        output, _ = process.communicate(timeout=timeout_s)
        path = directory / f"rank{rank}.pickle"
        outcome = pickle.loads(path.read_bytes()) if path.exists() else None
        ranks.append(Rank(outcome, process.returncode, output))
    return ranks
