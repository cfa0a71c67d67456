"""Installed versions against the sets that are known to work together."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from polyturn.params import Params
from polyturn.preflight.finding import Finding, Site

Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownGood:
    """One set of versions that was run as a whole."""

    name: str
    python: str
    packages: Mapping[str, str]


# The CPU row is docker/constraints-cpu.txt, the GPU row docker/gpu-engine.lock and gpu-pipeline.lock (tests compare).
CPU = KnownGood(
    "CPU",
    "3.11",
    {
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "prefect": "3.9.1",
        "dvc": "3.67.1",
        "dvc-s3": "3.3.0",
        "mlflow": "3.17.2",
        "datasets": "5.2.0",
        "pillow": "13.0.0",
        "math-verify": "0.9.0",
        "peft": "0.21.2",
        "megatron-core": "0.16.1",
    },
)
GPU = KnownGood(
    "GPU",
    "3.12",
    {
        "torch": "2.11.0",
        "transformers": "5.12.1",
        "prefect": "3.9.1",
        "dvc": "3.67.1",
        "dvc-s3": "3.3.0",
        "mlflow": "3.17.2",
        "datasets": "5.2.0",
        "math-verify": "0.9.0",
        "sglang": "0.5.15",
        "sglang-kernel": "0.4.4",
        "megatron-core": "0.19.2",
    },
)
_SGLANG = ("sglang", "sglang-kernel")
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_CUDNN_FIXED = (9, 16)

Installed = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parse(version: str) -> Version:
    """The numbers of a version, without what follows a plus sign.

    >>> parse("2.11.0+cu130")
    (2, 11, 0)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def packages(
    site: Site, installed: Installed = installed_version, python: str = platform.python_version()
) -> Finding:
    """Every package is as in a known-good set (its minor release), or between the two."""
    row = GPU if has_cuda_build(installed) else CPU
    wrong = [
        f"{name} {version or 'is not installed'} (known good: {_known(name)})"
        for name in row.packages
        if not _is_good(name, version := installed(name)) and _is_needed(name, version, site.params)
    ]
    if parse(python)[:2] not in (parse(CPU.python), parse(GPU.python)):
        wrong.append(f"Python {python} (known good: {CPU.python}, {GPU.python})")
    if not wrong:
        return Finding(
            "packages",
            "ok",
            f"{len(row.packages)} as in the {row.name} row of what is known to work",
        )
    pins = " ".join(
        f"'{name}=={version}'"
        for name, version in row.packages.items()
        if any(w.startswith(f"{name} ") for w in wrong)
    )
    fix = f"pip install {pins}" if pins else f"make .venv with Python {row.python}"
    return Finding("packages", "failed", "; ".join(wrong), fix)


def cudnn(site: Site, installed: Installed = installed_version) -> Finding:
    """torch 2.9 with cuDNN below 9.16 computes conv3d, and so patch embeddings, many times slower (pytorch#168167)."""
    del site
    torch = installed("torch")
    if torch is None or not has_cuda_build(installed):
        return Finding("cudnn", "skipped", "torch is a CPU build")
    package, version = next(
        ((name, found) for name in _CUDNN_PACKAGES if (found := installed(name))), ("", "")
    )
    if parse(torch)[:2] != (2, 9):
        return Finding("cudnn", "ok", f"torch {torch} with cuDNN {version or 'of the system'}")
    if version and parse(version)[:2] >= _CUDNN_FIXED:
        return Finding("cudnn", "ok", f"torch {torch} with cuDNN {version}")
    return Finding(
        "cudnn",
        "failed",
        f"torch {torch} with cuDNN {version or 'of the system'}: conv3d, and with it the vision tower, is many times "
        "slower below cuDNN 9.16 (pytorch#168167)",
        f"pip install '{package or _CUDNN_PACKAGES[1]}>=9.16.0.29', or torch 2.11 or newer",
    )


def has_cuda_build(installed: Installed = installed_version) -> bool:
    """Whether the installed torch is built for CUDA; known without loading it."""
    torch = installed("torch") or ""
    if "+" in torch:
        return "+cu" in torch
    return any(installed(name) for name in _CUDNN_PACKAGES)  # PyPI's own wheel


def _is_good(name: str, version: str | None) -> bool:
    """Within the minor release of a row, or between the rows."""
    if version is None:
        return False
    known = sorted(parse(row.packages[name]) for row in (CPU, GPU) if name in row.packages)
    found = parse(version)
    return known[0][:2] <= found[:2] <= known[-1][:2]


def _is_needed(name: str, version: str | None, chosen: Params) -> bool:
    """Whether params ask for the package; optional ones that are not used are not looked at."""
    if name in _SGLANG:
        return chosen.sampler.backend == "sglang" and not chosen.sampler.sglang.urls
    if name == "megatron-core":
        return chosen.learner.backend == "megatron"
    if name == "peft":
        return chosen.learner.lora is not None
    return True


def _known(name: str) -> str:
    return ", ".join(
        dict.fromkeys(row.packages[name] for row in (CPU, GPU) if name in row.packages)
    )
