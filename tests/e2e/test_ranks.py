"""Training on several processes: what one process makes but for rounding, and the same bytes after kills."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.training import (
    TRAIN,
    Outputs,
    assert_close,
    change,
    has_checkpoint,
    outputs,
    start_and_kill,
    start_slowly,
)
from tests.ports import free_ports
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=4)


@pytest.mark.parametrize(
    "learner",
    [{}, {"backend": "megatron", "tensor_parallel": 2, "sequence_parallel": True}],
    ids=["fsdp", "megatron"],
)
def test_two_processes_train_as_one_does_and_survive_kills(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path, learner: dict[str, object]
) -> None:
    """DESIGN 7: same groups, seeds and batches, numbers within rounding; and exact on equal processes."""
    change(project, learner={"num_processes": 2, **learner})
    result = project.stage("train")
    assert result.returncode == 0, result.stdout
    two = outputs(project, tmp_path / "two")
    assert_close(undisturbed, two)
    # a rank dies: its error, not a hang
    process = start_slowly(project)
    wait_until(lambda: has_checkpoint(project, 2), seconds=120, process=process)
    os.kill(rank_pid(project, 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "error: stage train: RankError: rank 1 was ended by SIGKILL" in output
    assert "Traceback" not in output
    assert project.runs()["train"][-1] == "FAILED"
    # the launcher dies, and so do its ranks; the next start goes on
    process = start_slowly(project)
    wait_until(lambda: has_checkpoint(project, 4), seconds=120, process=process)
    os.kill(process.pid, signal.SIGKILL)
    again = project.stage("train")
    assert again.returncode == 0, again.stdout
    process.communicate(timeout=30)  # the pipe is free: nobody of that run lives
    survived = outputs(project, tmp_path / "survived")
    assert (survived.weights, survived.trajectories) == (two.weights, two.trajectories)
    assert survived.curve == two.curve


def rank_pid(project: ToyProject, rank: int) -> int:
    """The process of a rank of the run in this checkout."""
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
            cwd = (entry / "cwd").resolve()
        except OSError:
            continue
        is_rank = b"tasks.ranks" in command and f"RANK={rank}".encode() in variables
        if entry.name.isdigit() and is_rank and cwd == project.path:
            return int(entry.name)
    raise AssertionError(f"no rank {rank}")


def test_the_agents_of_a_gang_meet_and_train_as_the_ranks_of_one_host_do(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """Two agents on this host, started as a rendered job starts them on two."""
    gang = {"launcher": "slurm", "launch": {"num_nodes": 2}, "work_uri": str(tmp_path / "shared")}
    change(project, learner={"num_processes": 2}, train=gang)
    refused = project.run(*TRAIN)
    assert refused.returncode == 2
    assert "train.launcher: slurm is rendered only" in refused.stdout
    (port,) = free_ports(1)
    env = {"POLYTURN_RENDEZVOUS": f"127.0.0.1:{port}"}
    member = project.start(sys.executable, "-m", "tasks.member", **env, POLYTURN_NODE="1")
    stage = project.run(*TRAIN, **env)
    said, _ = member.communicate(timeout=120)
    assert stage.returncode == 0, stage.stdout + said
    assert member.returncode == 0, said
    assert_close(undisturbed, outputs(project, tmp_path / "gang"))


def test_a_run_goes_on_with_another_number_of_processes_and_says_so(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    start_and_kill(project, after_checkpoint=3)
    change(project, learner={"num_processes": 2})
    result = project.stage("train")
    assert result.returncode == 0, result.stdout
    assert "was written by 1 ranks and is continued by 2" in result.stdout
    assert_close(undisturbed, outputs(project, tmp_path))
