"""What the tests of the Megatron learner do with it, in one process and on every rank of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyturn.learner.megatron.learner import MegatronLearner
from polyturn.learner.megatron.weights import hf_tensors
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from polyturn.world import ONE, World
from tests.unit import tiny
from tests.unit.learner.scenarios import (
    FSDP,
    PICTURES,
    SCENARIOS,
    Continued,
    Kind,
    Outcome,
    Refusal,
    Tensors,
    continued,
    outcome_of,
    refusal,
    update,
    weights_of,
)

TWO_KV_HEADS = tiny.SMALL.model_copy(update={"num_heads": 4, "num_kv_heads": 2})
LR = 1e-3


def learner_of(
    policy: Policy,
    *,
    world: World = ONE,
    loss: Mapping[str, object] | None = None,
    device: torch.device | None = None,
    **params: object,
) -> MegatronLearner:
    """A Megatron learner of its own copy of the policy."""
    chosen = {"lr": LR, "freeze_vision": False, "grad_clip": 1e9, "backend": "megatron", **params}
    own = tiny.copy_of(policy)
    return MegatronLearner(
        own,
        Renderer(own),
        LearnerParams.model_validate(chosen),
        LossParams.model_validate(loss or {}),
        1.0,
        world=world,
        device=device,
    )


def whole_gradients(learner: MegatronLearner) -> Tensors:
    """The gradients that the last step took, under Hugging Face names (collective); none after a refused update."""
    slices = {
        parameter: (part, part.slice_of(parameter).main)
        for part in learner.stepper.parts.values()
        for parameter in part.parameters.values()
    }
    if all(main is None or main.grad is None for _, main in slices.values()):
        return {}
    found = {
        id(parameter): part.gathered(parameter, None if main is None else main.grad)
        for parameter, (part, main) in slices.items()
    }
    pick: Callable[[nn.Parameter], Tensor] = lambda parameter: found[id(parameter)]  # noqa: E731
    return {name: t.clone() for name, t in hf_tensors(learner.model, pick, only_trained=True)}


MEGATRON = Kind(learner_of, whole_gradients, TWO_KV_HEADS)
TP2 = replace(MEGATRON, layout={"num_processes": 2, "tensor_parallel": 2})
TP2_SP = replace(MEGATRON, layout={**TP2.layout, "sequence_parallel": True})
DP2 = replace(MEGATRON, layout={"num_processes": 2})
ON_TWO = {
    "FSDP x2": replace(FSDP, layout=DP2.layout),
    "Megatron TP2": TP2,
    "Megatron DP2": DP2,
    "Megatron TP2 + SP": TP2_SP,
}
WITHOUT_ADAPTERS = [name for name, one in SCENARIOS.items() if "lora" not in (one.params or {})]
ON_TENSOR_RANKS = (
    "one sample in each micro-batch",
    "text only",
    "frozen tower and reference",
    "saving memory",
    "Qwen2.5-VL",
    "bfloat16",
)
ON_DATA_RANKS = (
    "a rank without samples",
    "text on one rank, pictures on the other",
    "saving memory",
)


# -- the same batch on every learner ------------------------------------------------------------------------------


def two_pictures_each(renderer: Renderer) -> list[TrainingSample]:
    """Replies of 3 to 61 tokens to prompts with two pictures; the first two are siblings."""
    third = tiny.picture(32, 48, 30)
    shown = (PICTURES, PICTURES, (PICTURES[1], third), (third, PICTURES[0]))
    return [
        tiny.training_sample(renderer, length, images=images, advantage=advantage, seed=seed)
        for length, advantage, images, seed in zip(
            (61, 3, 17, 10), (-0.5, 1.5, 0.8, -0.7), shown, (1, 1, 2, 3), strict=True
        )
    ]


@dataclass(frozen=True)
class Run:
    """Of five updates on one batch: the first one's loss, norm and gradients, and the weights after all."""

    loss: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors
    weights_with_large_eps: Tensors


def run_of(kind: Kind, world: World, device: torch.device | None = None) -> Run:
    """Five updates with AdamW's usual eps, and five with 1e-6 (collective)."""
    policy = tiny.qwen3(TWO_KV_HEADS)
    learner = kind.build(policy, world=world, device=device, **kind.layout)
    batch = two_pictures_each(learner.renderer)
    first = update(learner, batch)
    gradients = kind.gradients(learner)
    for _ in range(4):
        update(learner, batch)
    other = kind.build(policy, world=world, device=device, eps=1e-6, **kind.layout)
    for _ in range(5):
        update(other, batch)
    return Run(
        first.loss_metrics["loss"],
        first.grad_norm,
        gradients,
        weights_of(learner),
        weights_of(other),
    )


# -- all of it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything:
    """What a rank of two brings back."""

    runs: dict[str, Run]
    shared: dict[str, Outcome]  # TP2 + SP
    split: dict[str, Outcome]  # DP2
    refusals: list[Refusal]
    continued: dict[str, Continued]


def on_two(world: World) -> Everything:
    """Everything that is compared with one process (collective)."""
    torch.set_num_threads(1)
    return Everything(
        runs={name: run_of(kind, world) for name, kind in ON_TWO.items()},
        shared={name: outcome_of(SCENARIOS[name], world, kind=TP2_SP) for name in ON_TENSOR_RANKS},
        split={name: outcome_of(SCENARIOS[name], world, kind=DP2) for name in ON_DATA_RANKS},
        refusals=[refusal(world, kind) for kind in (TP2, DP2)],
        continued={name: continued(world, name, kind) for name, kind in (("tp", TP2), ("dp", DP2))},
    )


def on_four(world: World) -> Run:
    """Two pairs of ranks: each pair shares weights and tokens, the pairs split the samples (collective)."""
    torch.set_num_threads(1)
    return run_of(replace(TP2_SP, layout={**TP2_SP.layout, "num_processes": 4}), world)
