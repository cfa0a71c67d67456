"""The machine: GPUs with their memory, and the disks against what the run will write."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout
from polyturn.checkout import from_checkout, main_checkout
from polyturn.params import Params
from polyturn.preflight.finding import Finding, Site
from polyturn.preflight.versions import has_cuda_build

_MIN_FREE_FRACTION = 0.5  # of a GPU's memory that others may leave
_GB = 1e9
_ADAM = 3  # bytes of weights, first and second moment per byte of weights, all float32
_MODELS = (layout.WARMSTART, layout.BASE_MODEL)


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB."""

    name: str
    total_mib: int
    free_mib: int


def installed_gpus() -> list[Gpu]:
    """What nvidia-smi says; nothing where there is none."""
    query = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [Gpu(name, int(total), int(free)) for name, total, free in rows]


def gpus(site: Site, find: Callable[[], Sequence[Gpu]] = installed_gpus) -> Finding:
    """As many GPUs as params ask for, which others leave at least half of."""
    learner = site.params.learner
    if learner.device == "cpu":
        return Finding("gpu", "skipped", "learner.device is cpu")
    found = find()
    if not found:
        if learner.device == "cuda":
            return Finding("gpu", "failed", "learner.device is cuda, and nvidia-smi shows no GPU", "set learner.device: cpu, or mend the driver")  # fmt: skip
        return Finding("gpu", "skipped", "there is none: training is on the CPU")
    if not has_cuda_build():
        return Finding("gpu", "failed", f"{len(found)} GPUs are here, but torch is a CPU build", "install the CUDA build of torch, or set learner.device: cpu")  # fmt: skip
    wanted = num_gpus(site.params)
    if wanted > len(found):
        return Finding("gpu", "failed", f"params ask for {wanted} GPUs, {len(found)} are here", "lower learner.num_processes or sampler.sglang.num_servers")  # fmt: skip
    busy = [
        f"GPU {index} has {gpu.free_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB free"
        for index, gpu in enumerate(found[:wanted])
        if gpu.free_mib < _MIN_FREE_FRACTION * gpu.total_mib
    ]
    if busy:
        return Finding("gpu", "failed", "; ".join(busy), "end what else runs there (nvidia-smi shows it)")  # fmt: skip
    first = found[0]
    return Finding("gpu", "ok", f"{len(found)} x {first.name}, {first.free_mib / 1024:.0f} of {first.total_mib / 1024:.0f} GiB free")  # fmt: skip


def num_gpus(chosen: Params) -> int:
    """GPUs of this host that a run takes: those of the ranks, and of servers that are started beside them."""
    servers = chosen.sampler.sglang
    starts = chosen.sampler.backend == "sglang" and not servers.urls
    end = servers.gpu_offset + servers.num_servers * servers.tensor_parallel if starts else 0
    return max(chosen.learner.num_processes, end)


def disk(site: Site) -> Finding:
    """What training will write fits beside doctor.min_free_gb, on the checkout's disk and on that of train.work_uri."""
    margin = site.params.doctor.min_free_gb
    weights = weight_bytes(site)
    work, outs = (
        (0.0, 0.0) if weights is None else (_work_gb(site.params, weights), 2 * weights / _GB)
    )
    place = _work_place(site)
    place.mkdir(parents=True, exist_ok=True)
    is_one_disk = place.stat().st_dev == site.root.stat().st_dev
    needs = {site.root: outs + (work if is_one_disk else 0.0)}
    if not is_one_disk:
        needs[place] = work
    told: list[str] = []
    for path, written in needs.items():
        free = shutil.disk_usage(path).free / _GB
        told.append(
            f"{free:.1f} GB free on the disk of {path.resolve()}, about {written:.1f} GB will be written"
        )
        if free < written + margin:
            return Finding("disk", "failed", f"{told[-1]} and doctor.min_free_gb is {margin:g}", "free some space, lower train.keep_checkpoints, or set train.work_uri to another disk")  # fmt: skip
    unknown = " (without checkpoints: no model yet)" if weights is None else ""
    return Finding("disk", "ok", "; ".join(told) + unknown)


def weight_bytes(site: Site) -> int | None:
    """Bytes of the model's weight files: of the newest stage that has some, else of model.path."""
    given = site.params.model.path
    places = [site.root / name for name in _MODELS]
    if given and "://" not in given:
        places.append(from_checkout(given, site.root))
    for place in places:
        if sizes := [path.stat().st_size for path in place.glob("*.safetensors")]:
            return sum(sizes)
    return None


def _work_gb(chosen: Params, weights: int) -> float:
    """Checkpoints that are kept and one in the making, with as many candidate policies."""
    precision = 2 if chosen.model.dtype == "bfloat16" else 1  # float32 state of bfloat16 files
    checkpoint = weights * (1 if chosen.learner.lora else _ADAM * precision)
    return (chosen.train.keep_checkpoints + 1) * (checkpoint + weights) / _GB


def _work_place(site: Site) -> Path:
    uri = site.params.train.work_uri
    if not uri or "://" in uri:
        return site.root / layout.STATE
    return main_checkout(site.root) / uri
