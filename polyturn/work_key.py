"""The key of work in progress: a hash of all that changes a stage's result, and of nothing else."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from polyturn import layout
from polyturn.params import Params
from polyturn.params_tree import read_tree

# Keys that change when or where something is written, how far a run goes or how work is spread, but not what a step
# computes (but for rounding).
_NOT_IN_KEY = {
    "train": (
        "steps", "checkpoint_every", "keep_checkpoints", "resume", "work_uri", "stop", "max_logprob_gap",
    ),
    "learner": ("num_processes", "reshard_after_forward", "offload"),
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
    """Sixteen hex digits over the stage's declared deps (data, code), its params and the libraries' versions.

    Files are hashed by content, so that a checkout elsewhere gives the same key.
    """
    declared = cast("dict[str, dict[str, list[str]]]", read_tree(layout.DVC_YAML)["stages"])[stage]
    tree = params.model_dump(mode="json")
    sections = {
        name: {
            key: value
            for key, value in _section(tree[name]).items()
            if key not in _NOT_IN_KEY.get(name, ())
        }
        if isinstance(tree[name], dict)
        else tree[name]
        for name in declared["params"]
    }
    digest = hashlib.sha256(json.dumps(sections, sort_keys=True).encode())
    digest.update(f"python {platform.python_version()}\n".encode())
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sorted(file for dep in declared["deps"] for file in _files(Path(dep))):
        digest.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _section(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value)


def _files(dep: Path) -> Iterator[Path]:
    if dep.is_file():
        yield dep
    else:
        yield from (
            path for path in dep.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )
