"""The key of work in progress: a hash of all that changes a stage's result, and of nothing else."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import cast

from polyturn import layout
from polyturn.params import Params
from polyturn.params_tree import read_tree

# Keys that change when or where something is written, how far a run goes, when it gives up or how work is spread, but
# not what a step computes (but for rounding).
_NOT_IN_KEY = {
    "train": (
        "steps", "checkpoint_every", "keep_checkpoints", "resume", "work_uri", "lease_s", "launcher", "launch", "stop", "max_logprob_gap",
    ),
    "learner": (
        "num_processes", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "context_parallel",
        "reshard_after_forward", "offload",
    ),
    "loss": ("start_tolerance",),
    "env": ("max_failure_fraction",),
    "reward": ("max_failure_fraction",),
    "rollout": ("blind_problems", "blind_min_change"),
    "sampler.sglang": (
        "urls", "num_servers", "gpu_offset", "memory_fraction", "weight_update", "bucket_mb", "release_memory",
        "check_weights", "check_tensors", "control_timeout_s", "start_timeout_s", "request_timeout_s", "retries", "max_concurrency",
    ),
}  # fmt: skip
_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "pillow",
    "safetensors",
    "math-verify",
    "peft",
    "sympy",
    "mpmath",
)


def work_key(stage: str, params: Params) -> str:
    """Sixteen hex digits over the stage's declared deps (data, code), its params, the libraries' versions and the GPU.

    Files are hashed by content, so that a checkout elsewhere gives the same key. Step files that train.debug.rollouts
    names are no declared dep, but what is trained on.
    """
    declared = cast("dict[str, dict[str, list[str]]]", read_tree(layout.DVC_YAML)["stages"])[stage]
    tree = params.model_dump(mode="json")
    sections = {name: _of_key(tree[name], name) for name in declared["params"]}
    digest = hashlib.sha256(json.dumps(sections, sort_keys=True).encode())
    digest.update(f"python {platform.python_version()}\n".encode())
    for package in (*_PACKAGES, *_engines(params, sections)):
        digest.update(f"{package} {_version(package)}\n".encode())
    if "learner" in sections:
        digest.update(f"gpu {_gpu(params)}\n".encode())
    if "train" in sections and params.train.debug.rollouts:
        for path in sorted(Path(params.train.debug.rollouts).glob("step_*")):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    for path in sorted(file for dep in declared["deps"] for file in _files(Path(dep))):
        digest.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _engines(params: Params, sections: Collection[str]) -> list[str]:
    """Packages that only some runs compute with."""
    found: list[str] = []
    if "learner" in sections and params.learner.backend == "megatron":
        found.append("megatron-core")
    if "sampler" in sections and params.sampler.backend == "sglang":
        found.append("sglang")
    return found


def _version(package: str) -> str:
    """A package's version; servers that are given by URL run a SGLang that need not be here."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu(params: Params) -> str:
    """The kind of GPU that the learner computes on; another kind gives other bytes."""
    if params.learner.device == "cpu":
        return "none"
    import torch  # noqa: PLC0415  (the key of a stage on a CPU does not wait for it)

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _of_key(value: object, path: str) -> object:
    """What of a params value, at its dotted path, is in the key."""
    if not isinstance(value, dict):
        return value
    section = cast("dict[str, object]", value)
    kept = section.keys() - _NOT_IN_KEY.get(path, ())
    return {key: _of_key(section[key], f"{path}.{key}") for key in kept}


def _files(dep: Path) -> Iterator[Path]:
    if dep.is_file():
        yield dep
    else:
        yield from (
            path for path in dep.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )
