"""Training that is killed, crippled or moved to another machine: the same bytes, or one clear error and a checkpoint."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import boto3
import pytest
import torch
from botocore.client import BaseClient
from mlflow import MlflowClient
from safetensors.torch import load_file

from polyturn import layout
from tests import s3
from tests.e2e.training import TRAIN, Outputs, change, outputs, start_and_kill, start_slowly
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=4)


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


def work_dir(project: ToyProject) -> Path:
    """The work directory of the run in progress."""
    (path,) = [p for p in (project.path / ".polyturn/work/train").iterdir() if p.is_dir()]
    return path


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


def metric_history(project: ToyProject, name: str) -> list[tuple[int, float]]:
    """Of the newest training run."""
    run_id = json.loads((project.path / layout.TRAIN_RUN).read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{project.path}/mlflow.db")
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))


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
