"""A model large enough for a GPU to show what a tiny one does not, samples for it, and what both learners show on it."""

from __future__ import annotations

import torch

from polyturn.params import SmallModelParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from tests.unit import tiny
from tests.unit.learner.scenarios import Kind, Tensors, update

MEDIUM = SmallModelParams(
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vision_hidden_size=256,
    vision_num_layers=4,
    vision_num_heads=4,
    vision_intermediate_size=512,
    deepstack_layers=(0, 1),
    vocab_size=512,
    init_std=0.06,
)


def build() -> Policy:
    """About 20 M parameters."""
    return tiny.qwen3(MEDIUM)


def long_samples(renderer: Renderer) -> list[TrainingSample]:
    """Sixteen replies of 40 to 340 tokens, four siblings to a prompt with a picture."""
    pictures = [tiny.picture(64, 48, shade) for shade in range(4)]
    return [
        tiny.training_sample(
            renderer,
            40 + 20 * index,
            images=[pictures[index // 4]],
            advantage=1.0 - 0.4 * (index % 4),
            seed=index,
        )
        for index in range(16)
    ]


def flat(tensors: Tensors, like: Tensors) -> torch.Tensor:
    """All tensors of the names in `like`, end to end on the CPU in float64."""
    return torch.cat([tensors[name].cpu().double().flatten() for name in sorted(like)])


def cosine(one: torch.Tensor, two: torch.Tensor) -> float:
    return float(one @ two / (one.norm() * two.norm()))


def direction(found: Tensors, wanted: Tensors) -> float:
    """Cosine between two gradients over all tensors of `wanted` together."""
    return cosine(flat(found, wanted), flat(wanted, wanted))


def assert_recomputation_saves_memory(kind: Kind, policy: Policy) -> None:
    """Gradients of an update in bfloat16 are the same, and its peak is lower."""
    peaks: list[int] = []
    found: list[Tensors] = []
    for is_recomputed in (False, True):
        learner = kind.build(
            policy,
            device=torch.device("cuda"),
            precision="bfloat16",
            activation_checkpointing=is_recomputed,
        )
        chosen = long_samples(learner.renderer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update(learner, chosen, is_on_policy=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append(kind.gradients(learner))
        del learner
    print(f"peak of an update, MB: {peaks[0] / 1e6:.0f}, recomputed {peaks[1] / 1e6:.0f}")
    assert peaks[1] < peaks[0]
    assert direction(found[1], found[0]) > 0.999
