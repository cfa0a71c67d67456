"""A GRPO training step at the Qwen3-VL-2B shape (random weights) on one GPU: seconds, tokens/s, utilisation, memory.

The work of ../docs/gpu.md's table: 16 prompts with a 448 x 448 picture, 8 replies of 512 tokens each. Siblings share
their prompt and its picture, so fewer tokens run than the samples have: `mfu` counts the operations that run (no
recomputation) against 790 TFLOP/s, `tokens_per_s` the samples' own tokens. The peer is a plain Hugging Face step
(`--peer-s`, by default its recorded 4.72 s; `--peer` runs it here, interleaved).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from benchmarks import shapes
from polyturn.batching import micro_batches
from polyturn.envs.base import image_record
from polyturn.learner.base import Learner
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.vision import patch_cost
from polyturn.render import Renderer
from polyturn.types import Message, TrainingSample

PEAK = 790e12  # bfloat16 matrix products of an H200, short burst
RESULTS = Path(__file__).resolve().parent / "results"
GROUP = 8


@dataclass(frozen=True)
class Size:
    """How much work a step is."""

    shape: shapes.Shape
    num_prompts: int
    reply_tokens: int
    side_px: int


FULL = Size(shapes.QWEN3_VL_2B, 16, 512, 448)
TINY = Size(shapes.TINY, 2, 24, 64)


def main() -> None:
    """Measure one learner; print its table and RESULT, and write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learner", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", dest="pairs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three steps")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--profile", action="store_true", help="which kernels bound the step")
    parser.add_argument("--peer-s", type=float, default=4.72)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in arguments.pairs)
    params = LearnerParams.model_validate(
        {
            "backend": arguments.learner,
            "precision": "float32" if arguments.tiny else "bfloat16",
            "freeze_vision": False,
            "lr": 1e-6,
            **{key: json.loads(value) for key, value in settings.items()},
        }
    )
    repeats = 3 if arguments.quick else arguments.repeats
    result = measure(TINY if arguments.tiny else FULL, params, repeats, arguments.profile)
    result["ratio_vs_hf"] = round(arguments.peer_s / result["step_s"], 3)
    result["peer"] = f"plain Hugging Face step, {arguments.peer_s} s as recorded"
    result["settings"] = {"learner": arguments.learner, **settings}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("RESULT", json.dumps(result))


def measure(
    size: Size, params: LearnerParams, repeats: int, with_profile: bool
) -> dict[str, object]:
    """Time `repeats` updates after two that warm up (compilation, allocator)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = shapes.policy(size.shape, device=device, dtype=torch.float32)
    renderer = Renderer(policy)
    samples = make_samples(size, renderer)
    batches = micro_batches(
        samples, renderer, params.micro_batch_tokens, patch_cost=patch_cost(policy)
    )
    work = work_of(samples, batches, renderer)
    flops = shapes.training_flops(size.shape, work)
    learner = build(policy, renderer, params, device)

    def step() -> float:
        stats = learner.update(samples, lr_scale=1.0, is_on_policy=True)
        synchronize(device)
        return stats.grad_norm

    warm = [timed(step) for _ in range(2)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    norms: list[float] = []
    seconds = [timed(lambda: norms.append(step())) for _ in range(repeats)]
    step_s = median(seconds)
    own = sum(len(sample.token_ids) for sample in samples)
    result: dict[str, object] = {
        "learner": params.backend,
        "step_s": round(step_s, 3),
        "steps_s": [round(value, 3) for value in seconds],
        "warm_up_s": [round(value, 1) for value in warm],
        "tokens_per_s": round(own / step_s),
        "tokens": own,
        "tokens_run": work.tokens,
        "micro_batches": len(batches),
        "tflop_run": {name: round(value / 1e12, 1) for name, value in flops.items()},
        "mfu": round(sum(flops.values()) / step_s / PEAK, 4),
        "grad_norm": round(norms[-1], 5),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        result["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    print(f"{params.backend}: {step_s:.3f} s a step, warm-up {warm}", flush=True)
    if with_profile:
        result["profile"] = profiled(step)
    return result


def build(policy, renderer: Renderer, params: LearnerParams, device: torch.device) -> Learner:
    """The learner that is measured."""
    if params.backend == "fsdp":
        return FsdpLearner(policy, renderer, params, LossParams(), 1.0, device=device)
    from polyturn.learner.megatron.learner import MegatronLearner  # noqa: PLC0415  (optional)

    return MegatronLearner(policy, renderer, params, LossParams(), 1.0, device=device)


def make_samples(size: Size, renderer: Renderer) -> list[TrainingSample]:
    """Groups of siblings: one prompt of about 100 text tokens with its picture, replies of random tokens."""
    rng = np.random.default_rng(0)
    samples: list[TrainingSample] = []
    for group in range(size.num_prompts):
        pixels = rng.integers(0, 256, (size.side_px, size.side_px, 3), dtype=np.uint8)
        image = image_record(Image.fromarray(pixels))
        prompt = renderer.prompt([Message("user", (image, f"{group} " * 45))]).token_ids
        for advantage in rng.normal(size=GROUP):
            reply = rng.integers(0, 256, size.reply_tokens)
            mask = np.array([0] * len(prompt) + [1] * len(reply), dtype=np.int8)
            samples.append(
                TrainingSample(
                    token_ids=np.array([*prompt, *reply], dtype=np.int64),
                    loss_mask=mask,
                    logprobs=np.zeros(len(mask), dtype=np.float32),
                    images=(image,),
                    advantage=float(advantage),
                )
            )
    return samples


def work_of(
    samples: Sequence[TrainingSample], batches: Sequence[Sequence[int]], renderer: Renderer
) -> shapes.Work:
    """What runs: in each micro-batch a shared prompt once, its picture once."""
    tokens = patches = pictures = 0
    for batch in batches:
        prompts = {samples[index].images[0].sha256: samples[index] for index in batch}
        for first in prompts.values():
            tokens += int(np.argmax(first.loss_mask))
            patches += int(np.prod(renderer.grid(first.images[0]))) * shapes.MERGE**2
            pictures += 1
        tokens += sum(int(samples[index].loss_mask.sum()) for index in batch)
    attended = sum(len(sample.token_ids) ** 2 // 2 for sample in samples)
    scored = sum(int(sample.loss_mask.sum()) for sample in samples)
    return shapes.Work(tokens, scored, attended, patches, pictures)


def profiled(step: Callable[[], object]) -> dict[str, object]:
    """Share of a step in which the GPU works, number of kernels, and where the time goes by kind of kernel."""
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
    for name, length in top:
        print(f"{length:8.3f} s  {name}")
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


def timed(run: Callable[[], object]) -> float:
    """Seconds that it takes."""
    gc.collect()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
