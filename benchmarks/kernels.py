"""Which kernels a piece of GPU work spends its time in, by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def profiled(step: Callable[[], object], *, is_told: bool = True) -> dict[str, object]:
    """Share of a step in which the GPU works, number of kernels, and where the time goes by kind of kernel; `is_told`: print them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        started = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - started
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for kernel in kernels:
        length = kernel.time_range.elapsed_us() / 1e6
        kinds[kind_of(kernel.name)] = kinds.get(kind_of(kernel.name), 0.0) + length
        names[kernel.name[:90]] = names.get(kernel.name[:90], 0.0) + length
    top = sorted(names.items(), key=lambda item: -item[1])[:25]
    if is_told:
        print("\n".join(f"{length:8.3f} s  {name}" for name, length in top))
        print({kind: round(length, 3) for kind, length in kinds.items()}, flush=True)
    return {
        "wall_s": round(wall, 3),
        "busy_s": round(sum(kinds.values()), 3),
        "num_kernels": len(kernels),
        "by_kind_s": {kind: round(length, 3) for kind, length in sorted(kinds.items())},
    }


def kind_of(kernel: str) -> str:
    """Matrix products, attention, compiled or eager elementwise kernels, copies."""
    lower = kernel.lower()
    for kind, words in (
        ("attention", ("flash", "fmha", "attention")),
        ("matmul", ("gemm", "nvjet", "cutlass", "sm90_xmma", "splitk")),
        ("compiled", ("triton",)),
        ("copy", ("memcpy", "memset", "copy_kernel", "nccl", "split_with_sizes", "chunk_cat")),
        ("optimizer", ("adam", "multi_tensor")),
        ("gather", ("index", "gather", "scatter")),
    ):
        if any(word in lower for word in words):
            return kind
    return "elementwise"
