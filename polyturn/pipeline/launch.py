"""One gang per training task: a Slurm batch script or a Kubernetes job, in which torchrun's agents meet.

The first node runs the stage itself, through DVC, and the agent of its own ranks; every other node runs
`python -m tasks.member`, an agent that joins the rendezvous. The nodes share the checkout and train.work_uri.

Both are rendered only: nothing here submits them, and no cluster has run them yet.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from polyturn.params import Params
from polyturn.params.launch import NODE, RENDEZVOUS

_STAGE = "dvc repro --single-item train"
_MEMBER = "python -m tasks.member"
_NAME = "polyturn-train"


def render(chosen: Params, root: Path) -> str:
    """What train.launcher makes of the params: a command, a batch script, or YAML."""
    if chosen.train.launcher == "slurm":
        return _slurm(chosen, root)
    if chosen.train.launcher == "kubernetes":
        return _kubernetes(chosen, root)
    ranks = chosen.learner.num_processes
    return f"{_STAGE}  # {ranks} {'process' if ranks == 1 else 'ranks of torchrun'} on this host\n"


def _node_command(index: str) -> str:
    """Shell: the first node runs the stage, the others join it."""
    return f'export {NODE}="${index}"; if [ "${index}" = 0 ]; then exec {_STAGE}; else exec {_MEMBER}; fi'


def _slurm(chosen: Params, root: Path) -> str:
    launch = chosen.train.launch
    options = {
        "job-name": _NAME,
        "nodes": launch.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": chosen.gpus_per_node if chosen.learner.device != "cpu" else None,
        "cpus-per-task": launch.cpus_per_node,
        "mem": f"{launch.memory_gb}G",
        "time": f"{launch.hours}:00:00",
        "partition": launch.partition,
        "account": launch.account,
        "signal": "TERM@120",  # time for a last checkpoint before the end
        "output": "polyturn-train-%j.log",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    where = shlex.quote(str(root.resolve()))
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -euo pipefail",
            f"cd {where}",
            f"export PATH={where}/.venv/bin:$PATH",
            'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f'export {RENDEZVOUS}="${{hosts[0]}}:{launch.port}"',
            f"srun --kill-on-bad-exit=1 --wait=60 bash -c {shlex.quote(_node_command('SLURM_NODEID'))}",
            "",
        ]
    )


def _kubernetes(chosen: Params, root: Path) -> str:
    """A headless service, by which pods find the first one, and an indexed job of one pod per node."""
    launch = chosen.train.launch
    first = f"{_NAME}-0.{_NAME}.{launch.namespace}.svc.cluster.local"
    resources: dict[str, object] = {
        "cpu": launch.cpus_per_node,
        "memory": f"{launch.memory_gb}Gi",
    }
    if chosen.learner.device != "cpu":
        resources["nvidia.com/gpu"] = chosen.gpus_per_node
    container = {
        "name": "train",
        "image": launch.image,
        "workingDir": str(root.resolve()),
        "command": ["bash", "-c", _node_command("JOB_COMPLETION_INDEX")],
        "env": [{"name": RENDEZVOUS, "value": f"{first}:{launch.port}"}],
        "envFrom": [{"secretRef": {"name": launch.secret, "optional": True}}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "checkout", "mountPath": str(root.resolve())},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": _NAME,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": [
            {"name": "checkout", "persistentVolumeClaim": {"claimName": launch.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    labels = {"app": _NAME}
    metadata = {"name": _NAME, "namespace": launch.namespace, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": "rendezvous", "port": launch.port}],
            "publishNotReadyAddresses": True,
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.num_nodes,
            "parallelism": launch.num_nodes,
            "backoffLimit": 0,
            "activeDeadlineSeconds": launch.hours * 3600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return yaml.safe_dump_all([service, job], sort_keys=False)
