"""Two GPUs of one host: `python -m pytest -m gpu tests/gpu/test_two_gpus.py`; a server on GPU 1, and two ranks over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from polyturn.sampler.sglang.broadcast import DistributedTransfer
from tests.gpu import test_sglang_gpu as one_gpu
from tests.gpu.test_sglang_gpu import Host

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("TWO_RANKS_DEVICE", "cuda")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The learner on GPU 0, the server on GPU 1."""
    params = one_gpu.the_params(gpu_offset=1, weight_update="distributed", release_memory=False)
    with one_gpu.opened(tmp_path_factory.mktemp("apart"), params) as host:
        yield host


def group_of(host: Host) -> str:
    transfer = host.sampler.fleet.transfer
    assert isinstance(transfer, DistributedTransfer)
    return transfer._name


@needs_two
def test_new_weights_arrive_over_nccl_at_a_server_on_another_gpu(apart: Host):
    one_gpu.assert_new_weights_arrive(apart)
    assert group_of(apart) == "polyturn_weights_1"  # both updates by one group


@needs_two
def test_a_killed_server_comes_back_into_a_group_made_anew(apart: Host):
    before = group_of(apart)
    one_gpu.assert_a_killed_server_comes_back(apart)
    assert group_of(apart) != before
    one_gpu.push(apart, 6)
    started = time.monotonic()
    apart.sampler.close()
    print(f"group left and server ended after {time.monotonic() - started:.1f} s")


def start(directory: Path, kind: str) -> subprocess.Popen[str]:
    """Two ranks under torchrun's agent, which ends all when one dies."""
    directory.mkdir(exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["-m", "tests.gpu.two_ranks", str(directory), DEVICE, kind]
    return subprocess.Popen(
        [sys.executable, *torchrun, "--monitor-interval", "0.1", *module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs (or gloo on a CPU)"
)
def test_a_rank_that_is_killed_in_a_step_ends_the_job_and_a_restart_ends_at_the_same_bytes(
    tmp_path: Path,
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with ended(start(whole, "whole")) as undisturbed, ended(start(broken, "killed")) as killed:
        said, _ = killed.communicate(timeout=150)
        ended_s = time.time() - (broken / "killed").stat().st_mtime
        assert killed.returncode != 0, said
        assert "Signal 9 (SIGKILL)" in said, said[-3000:]
        assert not (broken / "outcome.json").exists()
        succeed(undisturbed)
    with ended(start(broken, "resumed")) as resumed:
        succeed(resumed)
    told = {each: json.loads((each / "outcome.json").read_text()) for each in (whole, broken)}
    print(f"\nthe job ended {ended_s:.1f} s after its rank was killed")
    assert told[broken] == told[whole]
    assert len(told[whole]["history"]) > 4  # each of four steps, and the score before them
    assert ended_s < 60


@contextmanager
def ended(job: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A job that does not outlive the test: its agent ends the ranks."""
    try:
        yield job
    finally:
        job.terminate()
        job.communicate(timeout=60)


def succeed(job: subprocess.Popen[str]) -> None:
    printed, _ = job.communicate(timeout=150)
    assert job.returncode == 0, printed[-3000:]
