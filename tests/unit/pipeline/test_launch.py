"""What train.launcher renders: a batch script that bash reads, YAML that holds together; and what cannot be a gang."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.cli import commands as cli
from polyturn.params import Params, ParamsError, parse
from polyturn.params.launch import RENDEZVOUS
from polyturn.pipeline import launch
from tasks import ranks

ROOT = Path("/shared/check out")


def params(launcher: str, *, ranks: int = 16, device: str = "auto", **gang: object) -> Params:
    train = {"launcher": launcher, "work_uri": "/shared/work", "launch": {"num_nodes": 2, **gang}}
    return parse({"train": train, "learner": {"num_processes": ranks, "device": device}})


def test_the_batch_script_is_bash_and_asks_for_what_the_gang_needs(tmp_path: Path) -> None:
    text = launch.render(params("slurm", partition="gpu", hours=3), ROOT)
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert options == {
        "job-name": "polyturn-train", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "16",
        "mem": "128G", "time": "3:00:00", "partition": "gpu", "signal": "TERM@120", "output": "polyturn-train-%j.log",
    }  # fmt: skip
    lines = text.splitlines()
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index(
        "set -euo pipefail"
    ), "Slurm reads no option after the first command"
    assert "cd '/shared/check out'" in lines


@pytest.mark.parametrize(
    ("node", "expected"), [("0", "dvc repro --single-item train"), ("1", "python -m tasks.member")]
)
def test_every_node_of_the_script_runs_its_part(tmp_path: Path, node: str, expected: str) -> None:
    """With stand-ins for Slurm's commands and ours."""
    tools = {
        "scontrol": "echo node-a; echo node-b",
        "srun": f'while [ "$1" != bash ]; do shift; done; SLURM_NODEID={node} exec "$@"',
        "dvc": 'echo "dvc $* at $POLYTURN_RENDEZVOUS"',
        "python": 'test "$POLYTURN_NODE" = 1; echo "python $* at $POLYTURN_RENDEZVOUS"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = launch.render(params("slurm", port=30000), tmp_path)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[a-b]"}
    done = subprocess.run(
        ["bash", "-c", script], env=path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{expected} at node-a:30000"


def test_a_gang_without_gpus_asks_for_none() -> None:
    assert "gpus-per-node" not in launch.render(params("slurm", device="cpu"), ROOT)
    assert "nvidia.com/gpu" not in launch.render(params("kubernetes", device="cpu"), ROOT)


def test_a_gang_asks_for_the_gpus_of_its_servers_too() -> None:
    """A server on GPUs of its own behind the ranks' eight; those given by URL are elsewhere."""
    own = params("slurm", ranks=16)
    for sglang, wanted in (
        ({"gpu_offset": 8, "num_servers": 2, "tensor_parallel": 2}, 12),
        ({"urls": ["http://server:30000"], "gpu_offset": 8}, 8),
    ):
        chosen = parse(
            {**own.model_dump(mode="json"), "sampler": {"backend": "sglang", "sglang": sglang}}
        )
        assert f"#SBATCH --gpus-per-node={wanted}\n" in launch.render(chosen, ROOT)


def documents(text: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    service, job = yaml.safe_load_all(text)
    return service, job


def test_the_kubernetes_job_is_one_pod_per_node_that_finds_the_first() -> None:
    service, job = documents(
        launch.render(params("kubernetes", namespace="team", port=30000), ROOT)
    )
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never"), "retries are Prefect's"
    # the name of the first pod: JOB-0.SUBDOMAIN.NAMESPACE, where SUBDOMAIN is a headless service over its labels
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    (container,) = pod["containers"]
    (variable,) = container["env"]
    host = f"{job['metadata']['name']}-0.{pod['subdomain']}.team.svc.cluster.local"
    assert variable == {"name": RENDEZVOUS, "value": f"{host}:30000"}
    assert service["spec"]["ports"][0]["port"] == 30000
    assert container["resources"]["limits"] == {"cpu": 16, "memory": "128Gi", "nvidia.com/gpu": 8}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["workingDir"] == str(ROOT)
    script = container["command"][-1]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    for index, expected in (("0", "dvc repro"), ("1", "python -m tasks.member")):
        stubs = 'dvc() { echo dvc "$@"; }; python() { echo python "$@"; }; '
        done = subprocess.run(
            ["bash", "-c", stubs + script.replace("exec ", "")],
            env={"JOB_COMPLETION_INDEX": index, "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith(expected)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            {"train": {"launcher": "slurm", "work_uri": "/w", "launch": {"num_nodes": 3}}},
            "learner.num_processes is 4",
        ),
        (
            {"train": {"launcher": "slurm", "launch": {"num_nodes": 2}}},
            "train.work_uri must be a path",
        ),
        (
            {
                "train": {
                    "launcher": "kubernetes",
                    "work_uri": "s3://b/w",
                    "launch": {"num_nodes": 2},
                }
            },
            "train.work_uri must be a path",
        ),
        ({"train": {"work_uri": "/w", "launch": {"num_nodes": 2}}}, "train.launcher: local starts"),
    ],
)
def test_a_gang_that_could_not_work_is_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(key)):
        parse({"learner": {"num_processes": 4}, **changes})


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_training_says_that_a_job_is_rendered_only(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RENDEZVOUS, raising=False)
    chosen = params(launcher, ranks=2, device="cpu")
    with pytest.raises(
        ValueError, match=rf"train.launcher: {launcher} is rendered only: `polyturn launch"
    ):
        ranks.run_ranks(chosen, tmp_path, "run")


def test_the_command_prints_what_params_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("learner: {num_processes: 2}\n")
    assert cli.main(["launch", "--dry-run"]) == 0
    assert (
        capsys.readouterr().out
        == "dvc repro --single-item train  # 2 ranks of torchrun on this host\n"
    )
    (tmp_path / "params.yaml").write_text("train: {launcher: slurm}\n")
    assert cli.main(["launch", "--dry-run"]) == 0
    assert "#SBATCH --nodes=1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["launch"])
