"""The machine: GPUs with their memory, and the disks against what the run will write."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout
from polyturn.params import Params
from polyturn.pipeline.checkout import from_checkout, main_checkout
from polyturn.preflight.finding import Finding, Site
from polyturn.preflight.versions import has_cuda_build

_MIN_FREE_FRACTION = 0.5  # of a GPU's memory that others may leave
_GB = 1e9
_ADAM = 3  # bytes of weights, first and second moment per byte of weights, all float32
_MODELS = (layout.WARMSTART, layout.BASE_MODEL)


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB, None where the driver does not say it (a GPU that has the host's memory)."""

    name: str
    total_mib: int | None
    free_mib: int | None
    uuid: str = ""

    @property
    def memory(self) -> str:
        """What is free of how much."""
        if self.total_mib is None or self.free_mib is None:
            return "memory shared with the host"
        return f"{self.free_mib / 1024:.0f} of {self.total_mib / 1024:.0f} GiB free"

    @property
    def is_busy(self) -> bool:
        """Whether others leave less than half of it."""
        if self.total_mib is None or self.free_mib is None:
            return False
        return self.free_mib < _MIN_FREE_FRACTION * self.total_mib


def installed_gpus() -> list[Gpu]:
    """What nvidia-smi says of the GPUs that this process may use; nothing where there is none."""
    query = ["--query-gpu=uuid,memory.total,memory.free,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(read_gpus(done.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def read_gpus(table: str) -> list[Gpu]:
    """The lines of nvidia-smi; one that is none, such as a warning, is passed over.

    >>> read_gpus("GPU-1, [N/A], [N/A], NVIDIA GB10")
    [Gpu(name='NVIDIA GB10', total_mib=None, free_mib=None, uuid='GPU-1')]
    """
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in table.splitlines()]
    return [Gpu(row[3], _mib(row[1]), _mib(row[2]), row[0]) for row in rows if len(row) == 4]


def visible(found: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names (numbers, or beginnings of UUIDs), up to the first that there is not.

    A part of a GPU (MIG-...) stands for itself, as nvidia-smi lists whole ones alone.
    """
    if chosen is None:
        return list(found)
    named: list[Gpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.isdecimal():
            same = list(found)[int(word) :][:1]
        elif word.startswith("MIG-"):
            same = [Gpu("a MIG device", None, None, word)]
        else:
            same = [gpu for gpu in found if word and gpu.uuid.startswith(word)]
        if not same:
            break
        named.append(same[0])
    return named


def _mib(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None


def gpus(site: Site, find: Callable[[], Sequence[Gpu]] = installed_gpus) -> Finding:
    """As many GPUs as params ask for, which others leave at least half of."""
    learner = site.params.learner
    if learner.device == "cpu":
        return Finding("gpu", "skipped", "learner.device is cpu")
    found = find()
    if not found:
        if learner.device == "cuda":
            return Finding("gpu", "failed", "learner.device is cuda, and nvidia-smi shows no GPU", "set learner.device: cpu, or mend the driver or CUDA_VISIBLE_DEVICES")  # fmt: skip
        return Finding("gpu", "skipped", "there is none: training is on the CPU")
    if not has_cuda_build():
        return Finding("gpu", "failed", f"{len(found)} GPUs are here, but torch is a CPU build", "install the CUDA build of torch, or set learner.device: cpu")  # fmt: skip
    wanted = site.params.gpus_per_node
    if wanted > len(found):
        return Finding("gpu", "failed", f"params ask for {wanted} GPUs, {len(found)} are here", "lower learner.num_processes or sampler.sglang.num_servers")  # fmt: skip
    busy = [
        f"GPU {index} has {gpu.memory}" for index, gpu in enumerate(found[:wanted]) if gpu.is_busy
    ]
    if busy:
        return Finding("gpu", "failed", "; ".join(busy), "end what else runs there (nvidia-smi shows it)")  # fmt: skip
    first = found[0]
    return Finding("gpu", "ok", f"{len(found)} x {first.name}, {first.memory}")  # fmt: skip


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
