"""A GRPO training step at the Qwen3-VL-2B shape (random weights) on one GPU or several: seconds, tokens/s, memory.

The work of ../docs/gpu.md's table: 16 prompts with a 448 x 448 picture, 8 replies of 512 tokens each. Siblings share
their prompt and its picture, so fewer tokens run than the samples have: `mfu` counts the operations that run (no
recomputation) against 790 TFLOP/s a GPU, `tokens_per_s` the samples' own tokens. The peer is a plain Hugging Face step
on one GPU (`--peer-s`, by default its recorded 4.72 s).

Several GPUs share the same samples, as ranks of torchrun:

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.train_2b --set num_processes=2 --one-s 2.19

`--one-s` is the step of the same learner on one GPU; `speedup_vs_one_gpu` then compares samples per second.
`--prompts 32` gives two GPUs as much work each as one has.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import shapes
from benchmarks.kernels import profiled
from polyturn.balance import partition
from polyturn.batching import loads
from polyturn.envs.base import image_record
from polyturn.learner.base import Learner
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.policy.vision import patch_cost
from polyturn.render import Renderer
from polyturn.types import Message, TrainingSample
from polyturn.world import ONE, World, joined

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
    """Measure what the command line says."""
    arguments = parse(sys.argv[1:])
    with joined() as world:
        run(arguments, world)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learner", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", dest="pairs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three steps")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--profile", action="store_true", help="which kernels bound the step")
    parser.add_argument("--prompts", type=int, help="instead of 16 (a toy: 2)")
    parser.add_argument(
        "--replicated-tower",
        action="store_true",
        help="Megatron, tensor_parallel > 1: every rank encodes every picture",
    )
    parser.add_argument("--one-s", type=float, help="a step of 16 prompts on one GPU, seconds")
    parser.add_argument("--peer-s", type=float, default=4.72)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure one learner; rank 0 prints its line and RESULT, and writes it where --out says (collective)."""
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
    size = TINY if arguments.tiny else FULL
    plan = Plan(
        replace(size, num_prompts=arguments.prompts or size.num_prompts),
        params,
        num_repeats=3 if arguments.quick else arguments.repeats,
        has_profile=arguments.profile,
        is_tower_replicated=arguments.replicated_tower,
    )
    plan.check(world)
    result = measure(plan, world)
    if not world.is_main:
        return
    result["ratio_vs_hf"] = round(arguments.peer_s / result["step_s"], 3)
    result["peer"] = f"plain Hugging Face step on one GPU, {arguments.peer_s} s as recorded"
    if arguments.one_s:
        work = plan.size.num_prompts / size.num_prompts
        speedup = arguments.one_s * work / result["step_s"]
        result["one_gpu_step_s"] = arguments.one_s
        result["speedup_vs_one_gpu"] = round(speedup, 3)
        result["scaling_efficiency"] = round(speedup / world.size, 3)
    result["settings"] = {"learner": arguments.learner, **settings}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("RESULT", json.dumps(result))


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    size: Size
    params: LearnerParams
    num_repeats: int
    has_profile: bool = False
    is_tower_replicated: bool = False

    def check(self, world: World) -> None:
        """Raise ValueError if the ranks, the params and the tower do not fit each other."""
        if self.params.num_processes != world.size:
            raise ValueError(
                f"num_processes is {self.params.num_processes}, but there are {world.size} ranks; start it by "
                "python -m torch.distributed.run --nproc-per-node N -m benchmarks.train_2b --set num_processes=N"
            )
        if self.is_tower_replicated and self.params.tensor_parallel == 1:
            raise ValueError(
                "--replicated-tower is of ranks that share pictures; give --learner megatron --set tensor_parallel=2"
            )


def measure(plan: Plan, world: World = ONE) -> dict[str, Any]:
    """Time updates after two that warm up (compilation, allocator); the slowest rank counts (collective)."""
    size, params = plan.size, plan.params
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    policy = shapes.policy(size.shape, device=device, dtype=torch.float32)
    renderer = Renderer(policy)
    samples = make_samples(size, renderer)
    batches = batches_of(samples, renderer, params, patch_cost(policy))
    work = work_of(samples, [batch for rank in batches for batch in rank], renderer)
    flops = shapes.training_flops(size.shape, work)
    learner = build(policy, renderer, plan, device, world)

    def step() -> float:
        stats = learner.update(samples, lr_scale=1.0, is_on_policy=True)
        synchronize(device)
        return stats.grad_norm

    def timed_step() -> float:
        world.barrier()
        return max(world.all_gather(timed(lambda: norms.append(step()))))

    norms: list[float] = []
    warm = [timed_step() for _ in range(2)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed_step() for _ in range(plan.num_repeats)]
    step_s = median(seconds)
    own = sum(len(sample.token_ids) for sample in samples)
    result: dict[str, Any] = {
        "learner": params.backend,
        "ranks": world.size,
        "prompts": size.num_prompts,
        "tower": "replicated" if plan.is_tower_replicated else "split",
        "step_s": round(step_s, 3),
        "steps_s": [round(value, 3) for value in seconds],
        "warm_up_s": [round(value, 1) for value in warm],
        "tokens_per_s": round(own / step_s),
        "tokens": own,
        "tokens_run": work.tokens,
        "micro_batches": len(batches[0]),
        "tflop_run": {name: round(value / 1e12, 1) for name, value in flops.items()},
        "mfu": round(sum(flops.values()) / step_s / (PEAK * world.size), 4),
        "grad_norm": round(norms[-1], 5),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **memory(device, world),
    }
    if world.is_main:
        print(f"{params.backend} x{world.size}: {step_s:.3f} s a step, warm-up {warm}", flush=True)
    if plan.has_profile:
        result["profile"] = profiled(step, is_told=world.is_main)
    return result


def memory(device: torch.device, world: World) -> dict[str, float]:
    """Peaks of the GPU that has most, GiB (collective)."""
    if device.type != "cuda":
        return {}
    allocated = world.all_gather(torch.cuda.max_memory_allocated())
    reserved = world.all_gather(torch.cuda.max_memory_reserved())
    return {
        "peak_gib": round(max(allocated) / 2**30, 2),
        "peak_reserved_gib": round(max(reserved) / 2**30, 2),
    }


def build(
    policy: Policy, renderer: Renderer, plan: Plan, device: torch.device, world: World
) -> Learner:
    """The learner that is measured (collective)."""
    if plan.params.backend == "fsdp":
        return FsdpLearner(
            policy, renderer, plan.params, LossParams(), 1.0, world=world, device=device
        )
    from benchmarks.replicated_tower import replicated  # noqa: PLC0415  (optional)
    from polyturn.learner.megatron.learner import MegatronLearner  # noqa: PLC0415

    with replicated() if plan.is_tower_replicated else nullcontext():
        return MegatronLearner(
            policy, renderer, plan.params, LossParams(), 1.0, world=world, device=device
        )


def batches_of(
    samples: Sequence[TrainingSample], renderer: Renderer, params: LearnerParams, cost: float
) -> list[list[list[int]]]:
    """The samples of each micro-batch of each data-parallel rank, as the learners split them."""
    return partition(
        loads(samples, renderer),
        num_ranks=params.num_processes // params.tensor_parallel,
        max_tokens=params.micro_batch_tokens,
        patch_cost=cost,
    )


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
