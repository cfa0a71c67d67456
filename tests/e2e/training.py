"""Training runs in a copy of the checkout: what they leave, how they are started and killed, and when two are equal."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyturn import layout
from polyturn.pipeline import workspace
from tests.toy_project import ToyProject, wait_until

TRAIN = (sys.executable, "-m", "tasks.train")
# Enough of a warm start for tool calls, and a reward that differs between siblings: every step is an update.
CHANGES = {
    "warmstart": {
        "phases": [
            {
                "name": "search",
                "mix": {"search": 0.6, "guess": 0.4},
                "batch_size": 16,
                "lr": 5e-3,
                "warmup_steps": 10,
                "max_steps": 60,
                "freeze_vision": True,
            }
        ]
    },
    "reward": {"terms": [{"term": "plugins.parity:parity", "weight": 1.0}]},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_turns": 3},
    "train": {"steps": 6, "eval_every": 2, "checkpoint_every": 1},
}
# Slow where a test waits for a checkpoint: a later one replaces it, and a step of this run takes 0.2 s.
PAUSE = "PARITY_PAUSE_S"
PARITY = f"""
import os
import time

def parity(trajectory, problem):
    time.sleep(float(os.environ.get("{PAUSE}", "0")))
    return float(int(trajectory.token_ids[trajectory.loss_mask == 1].sum()) % 2)
"""


@dataclass(frozen=True)
class Outputs:
    """What a training run left."""

    policy: Path
    curve: bytes
    trajectories: Mapping[str, bytes]

    @property
    def weights(self) -> bytes:
        """The bytes of the weights."""
        return (self.policy / "model.safetensors").read_bytes()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights."""
        return load_file(self.policy / "model.safetensors")

    def tokens(self) -> list[tuple[str, int, int, str, tuple[int, ...]]]:
        """File, group, sibling, problem and ids of every trajectory."""
        return [
            (name, r["group"], r["sibling"], r["problem_id"], tuple(r["token_ids"]))
            for name, data in self.trajectories.items()
            for r in map(json.loads, gzip.decompress(data).splitlines())
        ]


def outputs(project: ToyProject, keep: Path) -> Outputs:
    """Copy and read what the last training left."""
    for directory in (layout.POLICY, layout.TRAJECTORIES):
        shutil.copytree(project.path / directory, keep / directory.name)
    files = sorted((keep / layout.TRAJECTORIES.name).glob("*.gz"))
    return Outputs(
        keep / layout.POLICY.name,
        (project.path / layout.CURVE).read_bytes(),
        {file.name: file.read_bytes() for file in files},
    )


def change(project: ToyProject, **changes: dict[str, object]) -> None:
    workspace.write_params(project.path, changes)


def has_checkpoint(project: ToyProject, step: int) -> bool:
    pattern = f"*/checkpoints/step_{step:06d}/complete.json"
    return any((project.path / ".polyturn/work/train").glob(pattern))


def start_slowly(project: ToyProject, **env: str) -> subprocess.Popen[str]:
    """Start a training whose steps take longer than a test needs to see a checkpoint."""
    return project.start(*TRAIN, **env, **{PAUSE: "0.1"})


def start_and_kill(project: ToyProject, *, after_checkpoint: int) -> None:
    """SIGKILL the whole process group once a checkpoint is complete."""
    process = start_slowly(project)
    wait_until(lambda: has_checkpoint(project, after_checkpoint), seconds=120, process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def assert_close(one: Outputs, other: Outputs) -> None:
    """The same groups, seeds and tokens; weights and metrics equal but for rounding."""
    assert one.tokens() == other.tokens()
    tensors = other.tensors()
    for name, tensor in one.tensors().items():
        assert float((tensor - tensors[name]).norm()) <= 1e-4 * float(tensor.norm()), name
    rows = [list(csv.DictReader(o.curve.decode().splitlines())) for o in (one, other)]
    for left, right in zip(*rows, strict=True):
        for key in left.keys() - {"logprob_gap_mean", "logprob_gap_max"}:  # rounding itself
            assert (left[key] == "") == (right[key] == "")
            if left[key]:
                assert float(left[key]) == pytest.approx(float(right[key]), rel=1e-3, abs=1e-6), key
