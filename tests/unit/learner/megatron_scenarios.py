"""What the tests of the Megatron learner do with it, in one process and on every rank of two."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from polyturn.learner.base import Logprobs, NonFiniteError, UpdateStats
from polyturn.learner.fsdp import FsdpLearner
from polyturn.learner.megatron.learner import MegatronLearner
from polyturn.learner.megatron.offload import DeviceMemory
from polyturn.learner.megatron.weights import hf_tensors
from polyturn.model import Policy
from polyturn.params import LearnerParams, LossParams
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from polyturn.world import ONE, World
from tests.unit import tiny
from tests.unit.learner import scenarios
from tests.unit.learner.scenarios import PICTURES, SCENARIOS, Outcome, Scenario, Tensors, update

Learner = FsdpLearner | MegatronLearner
Layout = Mapping[str, object]

TWO_KV_HEADS = tiny.SMALL.model_copy(update={"num_heads": 4, "num_kv_heads": 2})
LR = 1e-3
TP2: Layout = {"num_processes": 2, "tensor_parallel": 2}
TP2_SP: Layout = {**TP2, "sequence_parallel": True}
DP2: Layout = {"num_processes": 2}
ON_TWO: dict[str, tuple[str, Layout]] = {
    "FSDP x2": ("fsdp", DP2),
    "Megatron TP2": ("megatron", TP2),
    "Megatron DP2": ("megatron", DP2),
    "Megatron TP2 + SP": ("megatron", TP2_SP),
}
WITHOUT_ADAPTERS = [name for name in SCENARIOS if SCENARIOS[name].params is None
                    or "lora" not in (SCENARIOS[name].params or {})]  # fmt: skip
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


def of_backend(
    backend: str, policy: Policy, world: World, device: torch.device | None, **params: object
) -> Learner:
    """A learner of either kind."""
    if backend == "megatron":
        return learner_of(policy, world=world, device=device, **params)  # type: ignore[arg-type]
    return scenarios.learner_of(policy, world=world, device=device, **{"lr": LR, **params})  # type: ignore[arg-type]


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


def gradients_of(learner: Learner) -> Tensors:
    """Whole gradients by name (collective)."""
    if isinstance(learner, MegatronLearner):
        return whole_gradients(learner)
    return scenarios.gradients(learner)


def weights_of(learner: Learner) -> Tensors:
    """What a sampler would get, as copies."""
    return {name: tensor.detach().clone() for name, tensor in learner.export_weights()}


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


def run_of(backend: str, world: World, layout: Layout, device: torch.device | None = None) -> Run:
    """Five updates with AdamW's usual eps, and five with 1e-6 (collective)."""
    policy = tiny.qwen3(TWO_KV_HEADS)
    learner = of_backend(backend, policy, world, device, **layout)
    batch = two_pictures_each(learner.renderer)
    first = update(learner, batch)  # type: ignore[arg-type]
    gradients = gradients_of(learner)
    for _ in range(4):
        update(learner, batch)  # type: ignore[arg-type]
    other = of_backend(backend, policy, world, device, eps=1e-6, **layout)
    for _ in range(5):
        update(other, batch)  # type: ignore[arg-type]
    return Run(
        first.loss_metrics["loss"],
        first.grad_norm,
        gradients,
        weights_of(learner),
        weights_of(other),
    )


# -- scenarios of the FSDP learner ----------------------------------------------------------------------------------


def outcome_of(
    scenario: Scenario, world: World, layout: Layout, device: torch.device | None = None
) -> Outcome:
    """What `scenarios.outcome_of` does, on Megatron (collective)."""
    policy = getattr(tiny, scenario.policy)()
    learner = learner_of(
        policy,
        loss=scenario.loss,
        world=world,
        device=device,
        **{**(scenario.params or {}), **layout},
    )
    everything = scenarios.samples(learner.renderer)
    chosen = [everything[index] for index in scenario.samples]
    stats = [step(learner, chosen, is_on_policy=True)]
    first = whole_gradients(learner)
    old = learner.logprobs(chosen)
    stats += [step(learner, chosen, old_logprobs=old) for _ in range(2)]
    return Outcome(
        stats, first, learner.logprobs(chosen), learner.logprob_gap(chosen), weights_of(learner)
    )


def step(
    learner: MegatronLearner,
    chosen: Sequence[TrainingSample],
    *,
    is_on_policy: bool = False,
    old_logprobs: Sequence[Logprobs] | None = None,
) -> UpdateStats:
    return learner.update(
        chosen, lr_scale=1.0, is_on_policy=is_on_policy, old_logprobs=old_logprobs
    )


# -- refusals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What happens to an update on a sample whose advantage is not a number."""

    message: str
    weights_before: Tensors
    weights_after: Tensors
    gradients: Tensors
    next_loss: float


def refusal(world: World, layout: Layout) -> Refusal:
    """An update that cannot be applied, and one after it (collective)."""
    learner = learner_of(tiny.qwen3(), world=world, **layout)
    good = scenarios.samples(learner.renderer)
    before = weights_of(learner)
    try:
        step(learner, [replace(good[0], advantage=float("nan")), *good[1:]])
    except NonFiniteError as error:
        message = str(error)
    left, after = whole_gradients(learner), weights_of(learner)
    next_loss = step(learner, good).loss_metrics["loss"]
    return Refusal(message, before, after, left, next_loss)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Continued:
    """Weights after a third step by where its state came from."""

    steady: Tensors  # never stopped
    resumed: Tensors  # saved at once, same layout
    snapshot: Tensors  # from a snapshot that was written after another update
    from_one: Tensors  # of one process


def continued(world: World, name: str, layout: Layout) -> Continued:
    """Two steps, a checkpoint, a third step; again from the checkpoint and from that of one process (collective)."""
    own, late = scenarios.place(world.size, name), scenarios.place(world.size, f"{name}_late")
    learner = learner_of(tiny.qwen3(TWO_KV_HEADS), world=world, **layout)
    chosen = scenarios.samples(learner.renderer)
    for _ in range(2):
        step(learner, chosen)
    if world.is_main:
        own.mkdir()
        late.mkdir()
    world.barrier()
    learner.save(own)
    write = learner.snapshot()
    step(learner, chosen)
    write(late)
    return Continued(
        steady=weights_of(learner),
        resumed=third_step(own.name, world, layout),
        snapshot=third_step(late.name, world, layout),
        from_one=third_step("one_of_1", world, layout),
    )


def third_step(place: str, world: World, layout: Layout) -> Tensors:
    """What a learner of other weights has after reading a checkpoint and one more update (collective)."""
    again = learner_of(tiny.qwen3(TWO_KV_HEADS, seed=1), world=world, **layout)
    chosen = scenarios.samples(again.renderer)
    again.load(Path(os.environ[scenarios.DIRECTORY]) / place)
    memory = DeviceMemory(again.stepper, [])  # as learner.offload does on a GPU
    memory.free()
    memory.take_back()
    step(again, chosen)
    return weights_of(again)


# -- all of it --------------------------------------------------------------------------------------------------------


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
        runs={name: run_of(backend, world, layout) for name, (backend, layout) in ON_TWO.items()},
        shared={name: outcome_of(SCENARIOS[name], world, TP2_SP) for name in ON_TENSOR_RANKS},
        split={name: outcome_of(SCENARIOS[name], world, DP2) for name in ON_DATA_RANKS},
        refusals=[refusal(world, layout) for layout in (TP2, DP2)],
        continued={
            name: continued(world, name, layout) for name, layout in (("tp", TP2), ("dp", DP2))
        },
    )


def on_four(world: World) -> Run:
    """Two pairs of ranks: each pair shares weights and tokens, the pairs split the samples (collective)."""
    torch.set_num_threads(1)
    return run_of("megatron", world, {**TP2_SP, "num_processes": 4})
