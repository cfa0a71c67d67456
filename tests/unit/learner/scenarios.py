"""What the tests of the learner do with it, in one process and on every rank of several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from polyturn.learner.base import Learner, Logprobs, NonFiniteError, UpdateStats
from polyturn.learner.fsdp import FsdpLearner
from polyturn.learner.sharding import whole
from polyturn.params import LearnerParams, LossParams, SmallModelParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from polyturn.world import ONE, World
from tests.unit import tiny

if TYPE_CHECKING:  # optional
    from polyturn.learner.megatron.learner import MegatronLearner

PICTURES = (tiny.picture(), tiny.picture(64, 32, 90))
DIRECTORY = "POLYTURN_TEST_STATES"  # where ranks write and read checkpoints
Tensors = dict[str, torch.Tensor]


def learner_of(
    policy: Policy,
    *,
    temperature: float = 1.0,
    loss: Mapping[str, object] | LossParams | None = None,
    world: World = ONE,
    device: torch.device | None = None,
    seed: int = 0,
    **params: object,
) -> FsdpLearner:
    """A learner of its own copy of the policy."""
    chosen = LearnerParams.model_validate(
        {"lr": 1e-3, "freeze_vision": False, "grad_clip": 1e9, **params}
    )
    own = tiny.copy_of(policy)
    minimised = LossParams.model_validate(loss or {})
    return FsdpLearner(
        own, Renderer(own), chosen, minimised, temperature, seed=seed, world=world, device=device
    )


def samples(renderer: Renderer) -> list[TrainingSample]:
    """Replies of 3 and 61 tokens and two between, with and without pictures."""
    return [
        tiny.training_sample(renderer, 3, images=PICTURES[:1], advantage=1.5, seed=1),
        tiny.training_sample(renderer, 61, images=PICTURES, advantage=-0.5, seed=2),
        tiny.training_sample(renderer, 10, advantage=-0.5, seed=3),
        tiny.training_sample(renderer, 7, images=PICTURES[1:], advantage=-0.5, seed=4),
    ]


def update(
    learner: Learner,
    chosen: Sequence[TrainingSample],
    *,
    is_on_policy: bool = False,
    old_logprobs: Sequence[Logprobs] | None = None,
) -> UpdateStats:
    return learner.update(
        chosen, lr_scale=1.0, is_on_policy=is_on_policy, old_logprobs=old_logprobs
    )


def weights_of(learner: Learner) -> Tensors:
    """What a sampler would get, as copies."""
    return {name: tensor.detach().clone() for name, tensor in learner.export_weights()}


def assert_refuses_to_work(learner: FsdpLearner | MegatronLearner) -> None:
    """Reading memory that is not there would give anything."""
    chosen = samples(learner.renderer)
    for use in (
        lambda: update(learner, chosen),
        lambda: learner.logprobs(chosen),
        learner.export_weights,
        learner.snapshot,
        lambda: learner.save(Path("nowhere")),
        lambda: learner.load(Path("nowhere")),
    ):
        with pytest.raises(AssertionError, match=r"onload\(\) first"):
            use()


def gradients(learner: FsdpLearner) -> Tensors:
    """Whole gradients by the parameters' own names (collective)."""
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in learner.parameters.items()
        if parameter.grad is not None
    }


@dataclass(frozen=True)
class Kind:
    """A kind of learner: how one is built of a copy of a policy, and how its whole gradients are seen (collective).

    `layout`: params on how its ranks share the work. `small`: the model whose state is saved and read.
    """

    build: Callable[..., FsdpLearner | MegatronLearner] = learner_of
    gradients: Callable[[Any], Tensors] = gradients
    small: SmallModelParams = tiny.SMALL
    layout: Mapping[str, object] = field(default_factory=dict)


FSDP = Kind()


@dataclass(frozen=True)
class Scenario:
    """Three updates of a policy on some of the samples."""

    policy: str = "qwen3"
    samples: Sequence[int] = (0, 1, 2, 3)
    loss: Mapping[str, object] | None = None
    params: Mapping[str, object] | None = None


LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
SCENARIOS = {
    "trained tower": Scenario(),
    "one sample in each micro-batch": Scenario(params={"micro_batch_tokens": 1}),
    "a rank without samples": Scenario(samples=[1]),
    "text on one rank, pictures on the other": Scenario(samples=[1, 2]),
    "text only": Scenario(samples=[2]),
    "frozen tower": Scenario(params={"freeze_vision": True}),
    "frozen tower and reference": Scenario(loss={"kl_coef": 0.1}, params={"freeze_vision": True}),
    "reference and entropy": Scenario(loss={"kl_coef": 0.1, "entropy_coef": 0.01}),
    "saving memory": Scenario(
        params={
            "activation_checkpointing": True,
            "reshard_after_forward": False,
            "logit_chunk_tokens": 16,
            "grad_clip": 0.5,
        }
    ),
    "adapters": Scenario(loss={"kl_coef": 0.1}, params={"freeze_vision": True, "lora": LORA}),
    "adapters in both towers": Scenario(
        loss={"kl_coef": 0.1}, params={"lora": {**LORA, "vision_modules": ["qkv"]}}
    ),
    "Qwen2.5-VL": Scenario(policy="qwen2_5"),
    "bfloat16": Scenario(params={"precision": "bfloat16"}),
}


@dataclass(frozen=True)
class Outcome:
    """What came out of a scenario; the same on every rank."""

    stats: list[UpdateStats]
    gradients: Tensors  # of the first update
    logprobs: list[Logprobs]  # after all updates
    gap: float
    weights: Tensors


def outcome_of(
    scenario: Scenario, world: World, device: torch.device | None = None, *, kind: Kind = FSDP
) -> Outcome:
    """Run a scenario (collective)."""
    params = {**(scenario.params or {}), **kind.layout}
    policy = getattr(tiny, scenario.policy)()
    learner = kind.build(policy, loss=scenario.loss, world=world, device=device, **params)
    everything = samples(learner.renderer)
    chosen = [everything[index] for index in scenario.samples]
    stats = [update(learner, chosen, is_on_policy=True)]
    first = kind.gradients(learner)
    old = learner.logprobs(chosen)
    stats += [update(learner, chosen, old_logprobs=old) for _ in range(2)]
    return Outcome(
        stats, first, learner.logprobs(chosen), learner.logprob_gap(chosen), weights_of(learner)
    )


def all_outcomes(world: World) -> dict[str, Outcome]:
    """All scenarios."""
    torch.set_num_threads(1)
    return {name: outcome_of(scenario, world) for name, scenario in SCENARIOS.items()}


@dataclass(frozen=True)
class Refusal:
    """What a learner does with one sample whose advantage is not a number."""

    message: str
    weights_before: Tensors
    weights_after: Tensors
    gradients: Tensors
    next_loss: float


def refusal(world: World, kind: Kind = FSDP) -> Refusal:
    """An update that cannot be applied, and one after it (collective)."""
    learner = kind.build(tiny.qwen3(), world=world, **kind.layout)
    good = samples(learner.renderer)
    before = weights_of(learner)
    try:
        update(learner, [replace(good[0], advantage=float("nan")), *good[1:]])
    except NonFiniteError as error:
        message = str(error)
    after, left = weights_of(learner), kind.gradients(learner)
    return Refusal(message, before, after, left, update(learner, good).loss_metrics["loss"])


@dataclass(frozen=True)
class Continued:
    """Weights after steps before and after a checkpoint, by what was done."""

    steady: Tensors  # never stopped
    resumed: Tensors  # from the checkpoint of the same world
    snapshot: Tensors  # from a snapshot that was written after another update
    from_one: Tensors  # from the checkpoint of one process


def continued(world: World, name: str = "own", kind: Kind = FSDP) -> Continued:
    """Two steps, a checkpoint of that name, a third step; again from the checkpoint and from one process's (collective)."""
    own, late = place(world.size, name), place(world.size, f"{name}_late")
    learner = kind.build(tiny.qwen3(kind.small), world=world, **kind.layout)
    chosen = samples(learner.renderer)
    for _ in range(2):
        update(learner, chosen)
    if world.is_main:
        own.mkdir()
        late.mkdir()
    world.barrier()
    learner.save(own)
    write = learner.snapshot()
    update(learner, chosen)
    write(late)
    return Continued(
        steady=weights_of(learner),
        resumed=third_step(own, world, kind),
        snapshot=third_step(late, world, kind),
        from_one=third_step(place(1, "own"), world, kind),
    )


def third_step(directory: Path, world: World, kind: Kind = FSDP) -> Tensors:
    """What a learner of other weights has after reading a checkpoint and one more update (collective)."""
    again = kind.build(tiny.qwen3(kind.small, seed=1), world=world, **kind.layout)
    again.logprobs(samples(again.renderer))  # must leave nothing of the old weights behind
    again.load(directory)
    again._memory.free()  # as learner.offload does on a GPU
    again._memory.take_back()
    update(again, samples(again.renderer))
    return weights_of(again)


def place(num_ranks: int, name: str) -> Path:
    """Where a checkpoint of so many ranks lies."""
    return Path(os.environ[DIRECTORY]) / f"{name}_of_{num_ranks}"


@dataclass(frozen=True)
class Everything:
    """What a rank of the shared run brings back."""

    outcomes: dict[str, Outcome]
    refusal: Refusal
    continued: Continued


def everything(world: World) -> Everything:
    """All that is compared between one process and two ranks."""
    return Everything(all_outcomes(world), refusal(world), continued(world))
