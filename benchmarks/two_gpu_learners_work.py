"""What a process of two_gpu_learners.py runs: updates on one batch in each layout of ranks, and how far each weight moved.

Started with torchrun's variables it is one of two ranks, else the single process that these are held against.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import shapes
from benchmarks.two_gpu_learners_cases import (
    LARGE_EPS,
    LR,
    NUM_UPDATES,
    ONE,
    TWO,
    USUAL_EPS,
    Case,
    Layout,
    Run,
    Tensors,
)
from polyturn.envs.base import image_record
from polyturn.learner.base import Learner
from polyturn.learner.fsdp import FsdpLearner
from polyturn.learner.megatron.learner import MegatronLearner
from polyturn.learner.megatron.weights import hf_tensors
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import Message, TrainingSample
from polyturn.world import World, is_rank, joined

SIBLINGS = 4


@dataclass(frozen=True)
class Size:
    """The model, the batch, and what the runs of one process that show bfloat16's noise differ in."""

    shape: shapes.Shape
    num_prompts: int
    side_px: int
    longest_reply: int
    micro_batch_tokens: Sequence[int]  # of the run that is compared with, and of those beside it


FULL = Size(
    # 29 M parameters
    shapes.Shape(4096, 512, 1536, 6, 8, 4, 64, 256, 1024, 4, 4, (0, 1)),
    num_prompts=8,
    side_px=192,
    longest_reply=320,
    micro_batch_tokens=(2048, 1024, 4096),
)
QUICK = Size(
    shapes.TINY, num_prompts=2, side_px=64, longest_reply=24, micro_batch_tokens=(256, 64, 128)
)


def main() -> None:
    """Run the layouts of this process; rank 0 (or the only process) writes one.json or two.json and the ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    with joined(with_gpu=arguments.device == "cuda") as world:
        prepare(arguments.device)
        runs = list(run_all(size, world, arguments.device, arguments.directory))
        if world.is_main:
            name = "two" if is_rank() else "one"
            told = {"shape": asdict(size.shape), "runs": [asdict(run) for run in runs]}
            (arguments.directory / f"{name}.json").write_text(json.dumps(told))


def prepare(device: str) -> None:
    """Float32 is float32, in products and convolutions; the only process takes the last GPU, where rank 0 is not."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device == "cuda" and not is_rank():
        torch.cuda.set_device(torch.cuda.device_count() - 1)


def cases(layout: Layout, size: Size) -> Iterator[Case]:
    """Float32 with both eps, bfloat16; on one process bfloat16 several times."""
    yield Case(layout.name, "float32", USUAL_EPS)
    yield Case(layout.name, "float32", LARGE_EPS)
    num_variants = len(size.micro_batch_tokens) if layout in ONE else 1
    for variant in range(num_variants):
        yield Case(layout.name, "bfloat16", USUAL_EPS, variant)


def run_all(size: Size, world: World, device: str, directory: Path) -> Iterator[Run]:
    """Every case of this process (collective)."""
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    policy = random_policy(size)
    samples = make_samples(size, Renderer(policy))
    for layout in TWO if world.size > 1 else ONE:
        for case in cases(layout, size):
            started = time.perf_counter()
            params = params_of(case, layout, size)
            learner = build(policy, params, world, where or torch.device("cpu"))
            chosen = samples[case.variant :] + samples[: case.variant]
            stats = [
                learner.update(chosen, lr_scale=1.0, is_on_policy=False) for _ in range(NUM_UPDATES)
            ]
            ways = ways_of(learner, policy)
            if world.is_main:
                torch.save(ways, directory / f"{case.key}.pt")
            del learner, ways
            gc.collect()
            seconds = time.perf_counter() - started
            if world.is_main:
                print(f"{seconds:5.1f} s  {case.key}", flush=True)
            losses = [one.loss_metrics["loss"] for one in stats]
            yield Run(case, losses, [one.grad_norm for one in stats], round(seconds, 2))


def params_of(case: Case, layout: Layout, size: Size) -> LearnerParams:
    """The learner section of a case."""
    return LearnerParams.model_validate(
        {
            "backend": layout.backend,
            "precision": case.precision,
            "eps": case.eps,
            "lr": LR,
            "grad_clip": 1e9,
            "freeze_vision": False,
            "micro_batch_tokens": size.micro_batch_tokens[case.variant],
            **layout.params,
        }
    )


def random_policy(size: Size) -> Policy:
    """Weights made on the CPU, so that every process has the same ones; large enough that logits differ."""
    policy = shapes.policy(size.shape, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return policy


def make_samples(size: Size, renderer: Renderer) -> list[TrainingSample]:
    """Siblings with one or two pictures, replies of many lengths, made-up logprobs of a sampler near the policy's."""
    rng = np.random.default_rng(0)
    level = -math.log(size.shape.rows)
    samples: list[TrainingSample] = []
    for group in range(size.num_prompts):
        shown = (size.side_px, size.side_px, 3)
        images = tuple(
            image_record(Image.fromarray(rng.integers(0, 256, shown, dtype=np.uint8)))
            for _ in range(1 + group % 2)
        )
        prompt = renderer.prompt([Message("user", (*images, f"Find x of {group}."))]).token_ids
        for advantage in rng.normal(size=SIBLINGS):
            reply = rng.integers(0, 256, rng.integers(3, size.longest_reply + 1))
            mask = np.array([0] * len(prompt) + [1] * len(reply), dtype=np.int8)
            made_up = rng.normal(level, 0.5, len(mask)) * mask
            samples.append(
                TrainingSample(
                    token_ids=np.array([*prompt, *reply], dtype=np.int64),
                    loss_mask=mask,
                    logprobs=made_up.astype(np.float32),
                    images=images,
                    advantage=float(advantage),
                )
            )
    return samples


def build(policy: Policy, params: LearnerParams, world: World, device: torch.device) -> Learner:
    """A learner of its own copy of the policy."""
    own = replace(policy, model=copy.deepcopy(policy.model))
    kind = FsdpLearner if params.backend == "fsdp" else MegatronLearner
    return kind(own, Renderer(own), params, LossParams(), 1.0, world=world, device=device)


def ways_of(learner: Learner, policy: Policy) -> Tensors:
    """By how much each weight of `policy` has changed, float32 on the CPU, a tied head left out (collective)."""
    start = policy.model.state_dict()
    return {
        name: tensor.detach().float().cpu() - start[name]
        for name, tensor in trained_weights(learner)
        if name != "lm_head.weight"
    }


def trained_weights(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """The float32 weights that the optimizer steps, whole (collective); Megatron exports bfloat16's rounded ones."""
    if not isinstance(learner, MegatronLearner):
        return learner.export_weights()
    found = {
        id(parameter): part.gathered(parameter, part.slice_of(parameter).main)
        for part in learner.stepper.parts.values()
        for parameter in part.parameters.values()
    }
    return hf_tensors(learner.model, lambda parameter: found[id(parameter)], only_trained=True)


if __name__ == "__main__":
    main()
