"""How far bfloat16 logprobs lie from float32 ones of the same weights: what rounding alone does to the logprob gap.

python -m benchmarks.logprob_noise [--quick] [--layers N] [--device cpu|cuda]

At the Qwen3-VL-2B shape with random weights, which are rounded to bfloat16 first, so that only what is computed differs.
The peer is plain Hugging Face in bfloat16. Two engines that round independently of each other are about sqrt(2) times
`hf` apart (`expected_gap`), so that a gap of that size between sampler and learner is no error of either.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import shapes
from benchmarks.train_2b import Size, make_samples
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.policy.vision import PatchReader
from polyturn.render import Renderer
from polyturn.types import TrainingSample

Logprobs = NDArray[np.float32]


def measure(size: Size, device: torch.device, num_samples: int) -> dict[str, float]:
    """Mean |difference| in nats over the trained tokens of each variant from float32, and of the variants from each other."""
    policy = rounded_policy(size, device)
    samples = make_samples(size, Renderer(policy))[:num_samples]
    exact = by_learner(policy, samples, precision="float32")
    shapes.cast_parameters(policy.model, torch.bfloat16)
    plain = by_hugging_face(policy, samples)
    del policy
    found = {"hf": plain, "learner": by_learner(rounded_policy(size, device), samples)}
    if device.type == "cuda":
        compiled = rounded_policy(size, device)
        found["learner_compiled"] = by_learner(compiled, samples, compile=True)
    noise = {name: distance(values, exact) for name, values in found.items()}
    noise |= {
        f"{name}_from_hf": distance(values, plain) for name, values in found.items() if name != "hf"
    }
    return noise | {"num_tokens": len(exact), "logprob_std": float(exact.std())}


def rounded_policy(size: Size, device: torch.device) -> Policy:
    """Float32 weights that bfloat16 can hold."""
    policy = shapes.policy(size.shape, device=device, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return policy


def by_learner(policy: Policy, samples: Sequence[TrainingSample], **params: object) -> Logprobs:
    """What the learner says of the trained tokens, [tokens of all samples]."""
    chosen = LearnerParams.model_validate(
        {"precision": "bfloat16", "freeze_vision": False, "micro_batch_tokens": 5000, **params}
    )
    learner = FsdpLearner(
        policy, Renderer(policy), chosen, LossParams(), 1.0, device=policy.model.device
    )
    scored = learner.logprobs(samples)
    return np.concatenate([x[s.loss_mask == 1] for x, s in zip(scored, samples, strict=True)])


@torch.no_grad()
def by_hugging_face(policy: Policy, samples: Sequence[TrainingSample]) -> Logprobs:
    """The same of a plain forward pass, one sample at a time."""
    model, reader = policy.model, PatchReader(policy)
    banned = list(Renderer(policy).family.banned_ids)
    found: list[Logprobs] = []
    for sample in samples:
        pixels, grid = reader.read(sample.images[0])
        ids = torch.from_numpy(sample.token_ids)[None].to(model.device)
        hidden = model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels.to(model.device),
            image_grid_thw=grid[None].to(model.device),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            use_cache=False,
        ).last_hidden_state
        at = torch.from_numpy(np.flatnonzero(sample.loss_mask == 1)).to(model.device)
        logits = model.lm_head(hidden[0, at - 1]).float()
        logits[..., banned] = -torch.inf
        picked = logits.log_softmax(-1).gather(-1, ids[0, at][:, None])[:, 0]
        found.append(picked.cpu().numpy())
    return np.concatenate(found)


def distance(one: Logprobs, other: Logprobs) -> float:
    """Mean |difference|."""
    return float(np.abs(one - other).mean())


def main() -> None:
    """Measure, and print the RESULT line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and short replies")
    parser.add_argument("--layers", type=int, help="of the decoder, instead of the shape's 28")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(shapes.TINY, 1, 24, 64) if chosen.quick else Size(shapes.QWEN3_VL_2B, 1, 256, 224)
    if chosen.layers:
        size = replace(size, shape=replace(size.shape, layers=chosen.layers))
    started = time.monotonic()
    noise = measure(size, torch.device(chosen.device), chosen.samples)
    told = {
        "benchmark": "logprob_noise",
        "device": chosen.device,
        "layers": size.shape.layers,
        **{name: round(value, 5) for name, value in noise.items()},
        "expected_gap": round(math.sqrt(2) * noise["hf"], 5),
        "ratio_vs_hf": round(noise["learner"] / noise["hf"], 3),
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(f"RESULT {json.dumps(told)}")


if __name__ == "__main__":
    main()
