"""CPU and GPUs of this machine."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import pynvml  # of nvidia-ml-py, which machines without GPUs need not have
except ImportError:
    pynvml = None


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVIDIA's driver names it."""

    name: str
    memory_gb: float  # 0: not known
    driver: str
    cuda: str  # the newest CUDA that the driver can run


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, in the driver's order; () without NVIDIA's driver or nvidia-ml-py."""
    if pynvml is None:
        return ()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver, cuda = str(pynvml.nvmlSystemGetDriverVersion()), _cuda_version()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                str(pynvml.nvmlDeviceGetName(handle)),
                _memory_gb(handle),
                driver,
                cuda,
            )
            for handle in handles
        )
    return ()


def _memory_gb(handle: object) -> float:
    """0 where the driver does not say it: a GPU that has the host's memory."""
    assert pynvml is not None
    with suppress(pynvml.NVMLError):
        return round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 1e9, 1)
    return 0.0


def cpu_model() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cuda_version() -> str:
    assert pynvml is not None
    number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 13000: 13.0
    return f"{number // 1000}.{number % 1000 // 10}"
