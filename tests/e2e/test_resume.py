"""Training that is killed, crippled or spread over processes: the same bytes, or one clear error and a checkpoint."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
import torch
from botocore.client import BaseClient
from mlflow import MlflowClient
from safetensors.torch import load_file

from polyturn import layout
from polyturn.pipeline import workspace
from tests import s3
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """A copy of the checkout with the tiny recipe, warm started, and trained once without a disturbance."""
    root = Path(__file__).resolve().parents[2]
    path = tmp_path_factory.mktemp("resume") / "checkout"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).splitlines():
        if (root / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, path / name)
    (path / "plugins" / "parity.py").write_text(PARITY)
    tiny = workspace.compose(path, recipe="tiny", overrides={}).changes
    workspace.write_params(path, tiny)
    workspace.write_params(path, CHANGES)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=path, check=True)
    project = ToyProject(path)
    project.commit()
    for name in ("fetch", "images", "model", "warmstart", "train"):
        result = project.stage(name)
        assert result.returncode == 0, result.stdout
    return project


@pytest.fixture(scope="module")
def undisturbed(ready: ToyProject, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The outputs of the first training."""
    return outputs(ready, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def project(ready: ToyProject, undisturbed: Outputs) -> Iterator[ToyProject]:
    """The checkout; params.yaml and the work directory are put back after the test."""
    text = (ready.path / layout.PARAMS).read_text()
    yield ready
    (ready.path / layout.PARAMS).write_text(text)
    shutil.rmtree(ready.path / ".polyturn" / "work", ignore_errors=True)


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


def work_dir(project: ToyProject) -> Path:
    """The work directory of the run in progress."""
    (path,) = [p for p in (project.path / ".polyturn/work/train").iterdir() if p.is_dir()]
    return path


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


def test_training_learns_something_and_uses_its_tools(
    undisturbed: Outputs, ready: ToyProject
) -> None:
    """Else the equalities below would be of runs that do nothing."""
    rows = list(csv.DictReader(undisturbed.curve.decode().splitlines()))
    assert all(float(row["grad_norm"]) > 0 for row in rows[:-1])
    assert any(float(row["tool_calls_mean"]) > 0 for row in rows[:-1])
    start = load_file(ready.path / layout.WARMSTART / "model.safetensors")
    assert any(not torch.equal(t, start[name]) for name, t in undisturbed.tensors().items())


def test_ten_kills_at_seeded_moments_end_at_the_same_bytes_and_history(
    project: ToyProject,
) -> None:
    """At least one inside each of rollout, update, evaluation and checkpoint write, as the log proves."""
    script = project.path / "scripts" / "check_resume.py"
    result = project.run(sys.executable, str(script), "--checkout", str(project.path))
    assert result.returncode == 0, result.stdout
    hits = re.search(r"(\d+) kills, inside: (\{.*\}); (\d+) runs compared", result.stdout)
    assert hits, result.stdout
    assert int(hits[1]) >= 10
    found = json.loads(hits[2].replace("'", '"'))
    assert set(found) == {"rollout", "update", "evaluation", "checkpoint"}
    assert min(found.values()) >= 1
    assert result.stdout.count("same bytes") == int(hits[3]) >= 10


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


def test_the_agents_of_a_gang_meet_and_train_as_the_ranks_of_one_host_do(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """Two agents on this host, started as a rendered job starts them on two."""
    gang = {"launcher": "slurm", "launch": {"num_nodes": 2}, "work_uri": str(tmp_path / "shared")}
    change(project, learner={"num_processes": 2}, train=gang)
    refused = project.run(*TRAIN)
    assert refused.returncode == 2
    assert "train.launcher: slurm is rendered only" in refused.stdout
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {"POLYTURN_RENDEZVOUS": f"127.0.0.1:{probe.getsockname()[1]}"}
    member = project.start(sys.executable, "-m", "tasks.member", **env, POLYTURN_NODE="1")
    stage = project.run(*TRAIN, **env)
    said, _ = member.communicate(timeout=120)
    assert stage.returncode == 0, stage.stdout + said
    assert member.returncode == 0, said
    assert_close(undisturbed, outputs(project, tmp_path / "gang"))


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


def test_a_run_goes_on_with_another_number_of_processes_and_says_so(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    start_and_kill(project, after_checkpoint=3)
    change(project, learner={"num_processes": 2})
    result = project.stage("train")
    assert result.returncode == 0, result.stdout
    assert "was written by 1 ranks and is continued by 2" in result.stdout
    assert_close(undisturbed, outputs(project, tmp_path))


def test_a_full_disk_is_one_error_and_costs_no_checkpoint(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """CKPT-20, CKPT-16: no checkpoint fits, but a policy and the database do; then fewer steps than there are are asked for."""
    database = project.path / "mlflow.db"  # earlier tests have grown it beyond the limit
    database.rename(tmp_path / "earlier.db")
    start_and_kill(project, after_checkpoint=2)
    kept = {p.name for p in (work_dir(project) / "checkpoints").glob("step_*")}
    limited = f"ulimit -f 5000; exec {' '.join(TRAIN)}"
    result = project.run("bash", "-c", limited)
    assert result.returncode == 1, result.stdout
    errors = [line for line in result.stdout.splitlines() if line.startswith("error: stage train")]
    assert len(errors) == 1, result.stdout
    assert "File too large" in errors[0]
    left = {p.name for p in (work_dir(project) / "checkpoints").iterdir()}
    assert kept & left
    assert all(name.startswith("step_") for name in left)
    assert project.runs()["train"][-1] == "FAILED"
    change(project, train={"steps": 1})
    result = project.stage("train")
    assert result.returncode == 2
    assert "train.steps is 1, but the run that would go on from" in result.stdout
    assert project.runs()["train"][-1] == "FAILED"
    change(project, train={"steps": 6})
    assert project.stage("train").returncode == 0
    assert outputs(project, tmp_path).weights == undisturbed.weights
    (tmp_path / "earlier.db").replace(database)


def test_a_named_run_goes_on_under_other_code(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """Its checkpoints are taken over, and both runs say so."""
    start_and_kill(project, after_checkpoint=3)
    run_id = json.loads((project.path / ".polyturn/work/train.json").read_text())["run_ids"][0]
    code = project.path / "polyturn" / "advantage.py"
    text = code.read_text()
    code.write_text(text + "# other code\n")
    try:
        change(project, train={"resume": run_id})
        result = project.stage("train")
        assert result.returncode == 0, result.stdout
        assert f"train.resume: goes on from run {run_id} of commit" in result.stdout
        assert "step_00000" in result.stdout  # which checkpoint
        assert outputs(project, tmp_path).weights == undisturbed.weights
        change(project, train={"resume": "0" * 32})
        result = project.stage("train")
        assert result.returncode == 2
        assert "train.resume must be auto, never or a run's id" in result.stdout
    finally:
        code.write_text(text)


def test_work_on_a_shared_path_is_leased_and_removed_at_the_end(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    change(project, train={"work_uri": str(shared)})
    result = project.stage("train")
    assert result.returncode == 0, result.stdout
    assert [path.suffix for path in shared.iterdir()] == [".lock"]
    assert outputs(project, tmp_path / "kept").weights == undisturbed.weights


def test_a_second_worker_goes_on_from_a_bucket_where_one_died_with_its_directory(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """The same bytes and history; what lies in the bucket goes once the outputs are in place."""
    with s3.serving("team") as url:
        storage = {"endpoint_url": url}
        change(project, train={"work_uri": "s3://team/work", "lease_s": 3.0}, storage=storage)
        first = tmp_path / "first"
        shutil.copytree(project.path, first, ignore=shutil.ignore_patterns(".polyturn"))
        process = start_slowly(ToyProject(first), **s3.CREDENTIALS)
        wait_until(lambda: "snapshot_000003.json" in bucket(url), seconds=120, process=process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        shutil.rmtree(first)
        assert "lease.json" in bucket(url)
        result = project.run(*TRAIN, **s3.CREDENTIALS)
        assert result.returncode == 0, result.stdout
        assert "who is silent, is taken over" in result.stdout
        fetched = re.search(r"train: fetched the checkpoint of step (\d)", result.stdout)
        assert fetched, result.stdout
        assert int(fetched[1]) >= 3
        assert f"after step {fetched[1]}" in result.stdout
        second = outputs(project, tmp_path / "second")
        assert second.weights == undisturbed.weights
        assert (second.curve, second.trajectories) == (undisturbed.curve, undisturbed.trajectories)
        assert bucket(url) == {}
    history = metric_history(project, "rollout/raw_reward")
    assert [step for step, _ in history] == list(range(6))


def test_a_worker_that_slept_while_another_took_over_ends_without_a_trace(
    project: ToyProject, undisturbed: Outputs, tmp_path: Path
) -> None:
    """PIPE-26: no double training on one work directory."""
    with s3.serving("team") as url:
        storage = {"endpoint_url": url}
        change(project, train={"work_uri": "s3://team/work", "lease_s": 3.0}, storage=storage)
        sleeper = tmp_path / "sleeper"
        shutil.copytree(project.path, sleeper, ignore=shutil.ignore_patterns(".polyturn"))
        process = start_slowly(ToyProject(sleeper), **s3.CREDENTIALS)
        wait_until(lambda: "snapshot_000001.json" in bucket(url), seconds=120, process=process)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        feign_another_machine(url)
        result = project.run(*TRAIN, **s3.CREDENTIALS)
        assert result.returncode == 0, result.stdout
        assert "who is silent, is taken over" in result.stdout
        assert outputs(project, tmp_path / "second").weights == undisturbed.weights
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2, output
        assert "was taken over by nobody: it was removed" in output
        assert "Traceback" not in output
        assert bucket(url) == {}
        assert ToyProject(sleeper).runs()["train"][-1] == "FAILED"


def client_of(url: str) -> BaseClient:
    """A client of the test's server."""
    return boto3.client(
        "s3", "us-east-1", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s"
    )


def bucket(url: str) -> dict[str, str]:
    """Keys of the run's objects by their names."""
    found = client_of(url).list_objects_v2(Bucket="team").get("Contents", [])
    return {entry["Key"].split("/", 2)[-1]: entry["Key"] for entry in found}


def feign_another_machine(url: str) -> None:
    """Change the lease so that nobody can see whether its holder's process lives."""
    client, key = client_of(url), bucket(url)["lease.json"]
    lease = client.get_object(Bucket="team", Key=key)["Body"].read()
    changed = lease.replace(b'"machine": "', b'"machine": "another ')
    client.put_object(Bucket="team", Key=key, Body=changed)


def metric_history(project: ToyProject, name: str) -> list[tuple[int, float]]:
    """Of the newest training run."""
    run_id = json.loads((project.path / layout.TRAIN_RUN).read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{project.path}/mlflow.db")
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))


def test_a_bucket_that_cannot_be_reached_is_one_line(project: ToyProject) -> None:
    """PIPE-10: no training before it, no hang."""
    change(
        project,
        train={"work_uri": "s3://team/work"},
        storage={"endpoint_url": "http://127.0.0.1:9"},
    )
    started = time.monotonic()
    result = project.run(*TRAIN, **s3.CREDENTIALS)
    assert result.returncode == 1, "it may be back at the next try"
    assert "127.0.0.1:9 cannot be reached" in result.stdout
    assert "doctor.allow" in result.stdout
    assert "Traceback" not in result.stdout
    assert time.monotonic() - started < 60
