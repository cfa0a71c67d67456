"""What the tests of the Megatron policy do with it, in one process and on every rank of two."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyturn.batching import collate
from polyturn.learner.megatron import parallel, weights
from polyturn.learner.megatron import policy as megatron
from polyturn.learner.megatron.policy import MegatronPolicy
from polyturn.params import LearnerParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import Batch
from polyturn.world import World
from tests.unit import tiny
from tests.unit.learner.megatron import parts
from tests.unit.learner.scenarios import PICTURES, samples

CPU = torch.device("cpu")
TEMPERATURE = 0.8
Tensors = dict[str, Tensor]


def qwen3() -> Policy:
    """Tied, one key and value head, one level after the first layer."""
    return tiny.qwen3()


def qwen3_untied() -> Policy:
    """A head of its own, two key and value heads, levels after both layers, an odd vocabulary."""
    chosen = {
        "tie_embeddings": False,
        "num_heads": 4,
        "num_kv_heads": 2,
        "deepstack_layers": (0, 1),
    }
    policy = tiny.qwen3(tiny.SMALL.model_copy(update=chosen), seed=1)
    policy.model.resize_token_embeddings(447)
    return policy


def qwen2_5() -> Policy:
    """Tied, with biases of queries, keys and values that are not 0."""
    policy = tiny.qwen2_5()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in policy.model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return policy


def qwen2_5_untied() -> Policy:
    """A head of its own."""
    policy = qwen2_5()
    model = copy.deepcopy(policy.model)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    shape = model.lm_head.weight.shape
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    model.lm_head.weight = nn.Parameter(0.2 * drawn)
    return replace(policy, model=model)


POLICIES = {
    "Qwen3-VL": qwen3,
    "Qwen3-VL untied": qwen3_untied,
    "Qwen2.5-VL": qwen2_5,
    "Qwen2.5-VL untied": qwen2_5_untied,
}
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "frozen tower": {"freeze_vision": True},
    "saving memory": {"activation_checkpointing": True, "logit_chunk_tokens": 16},
}
TP2: dict[str, object] = {"num_processes": 2, "tensor_parallel": 2}
SPLIT: dict[str, dict[str, object]] = {
    "TP2": {},
    "TP2 + SP": {"sequence_parallel": True},
    "TP2, frozen tower": {"freeze_vision": True},
    "TP2 + SP, saving memory": {"sequence_parallel": True, **SETTINGS["saving memory"]},
}


def learner_params(**overrides: object) -> LearnerParams:
    return LearnerParams.model_validate(
        {"backend": "megatron", "freeze_vision": False, **overrides}
    )


def batch_of(policy: Policy) -> Batch:
    """Unequal lengths, an odd number of tokens, two pictures per sample, and a sibling that shares a prompt."""
    renderer = Renderer(policy)
    chosen = samples(renderer)
    chosen.append(tiny.training_sample(renderer, 6, images=PICTURES, advantage=0.5, seed=2))
    batch = collate(chosen, [1.0] * len(chosen), renderer)
    if len(batch.token_ids) % 2 == 0:
        chosen[2] = tiny.training_sample(renderer, 11, advantage=-0.5, seed=3)
        batch = collate(chosen, [1.0] * len(chosen), renderer)
    return batch


def batch_with_one_picture(policy: Policy) -> Batch:
    """One of two ranks has nothing to encode."""
    renderer = Renderer(policy)
    return collate(samples(renderer)[:1], [1.0], renderer)


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A loss in which every token and every entropy counts differently."""
    weights_ = torch.linspace(-1, 1, len(logprobs))
    return (logprobs * weights_).sum() + 0.1 * (entropy * weights_.flip(0)).sum()


@dataclass(frozen=True)
class Scored:
    """Logprobs and entropies of a batch, and the loss's gradients by Hugging Face name."""

    logprobs: Tensor
    entropy: Tensor
    gradients: Tensors


def built(policy: Policy, world: World, **overrides: object) -> MegatronPolicy:
    """A Megatron policy with weights of its own (collective)."""
    params = learner_params(**overrides)
    parallel.set_up(world, params, CPU)
    return megatron.build(tiny.copy_of(policy), params, TEMPERATURE, device=CPU)


def scored(policy: MegatronPolicy, batch: Batch) -> Scored:
    """Score and differentiate (collective)."""
    scores = policy.score(batch, with_tower=True, with_entropy_gradient=True)
    loss_of(scores.logprobs, scores.entropy).backward()
    sum_over_ranks(policy)
    own = weights.hf_tensors(policy, gradient_of, only_trained=True)
    return Scored(
        scores.logprobs.detach(), scores.entropy.detach(), {name: g.clone() for name, g in own}
    )


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def sum_over_ranks(policy: MegatronPolicy) -> None:
    """What is whole on every rank of the group, but computed from a part: the tower, norms of heads and of tokens."""
    marked = [
        parameter
        for name, parameter in policy.language.named_parameters()
        if "q_layernorm" in name
        or "k_layernorm" in name
        or getattr(parameter, "sequence_parallel", False)
    ]
    for parameter in (*policy.visual.parameters(), *marked):
        if parameter.requires_grad:
            parameter.grad = gradient_of(parameter)
            dist.all_reduce(parameter.grad, group=policy.group)


@dataclass(frozen=True)
class Moved:
    """Weights after a way through Megatron, and how many of Megatron's whole tensors the export held at a time."""

    exported: Tensors
    num_alive: int
    reloaded: Tensors  # exported again after other weights were loaded, and these once more


def moved(policy: Policy, world: World, **overrides: object) -> Moved:
    """Export, load other weights, load these again (collective)."""
    model = built(policy, world, **overrides)
    exported = {name: tensor.clone() for name, tensor in weights.hf_tensors(model)}
    weights.load_hf(model, {name: torch.full_like(t, 7.0) for name, t in exported.items()})
    assert all(bool((tensor == 7).all()) for _, tensor in weights.hf_tensors(model))
    weights.load_hf(model, exported)
    return Moved(exported, most_alive(model), dict(weights.hf_tensors(model)))


def most_alive(model: MegatronPolicy) -> int:
    """How many gathered tensors exist at one time while the export is walked through."""
    gathered: list[weakref.ref[Tensor]] = []
    original = weights._gathered

    def recorded(*args: Any) -> Tensor:
        whole = original(*args)
        gathered.append(weakref.ref(whole))
        return whole

    with mock.patch.object(weights, "_gathered", recorded):
        return max(
            sum(one() is not None for one in gathered)
            for name, _ in weights.hf_tensors(model)
            if not name.startswith("model.visual.")
        )


@dataclass(frozen=True)
class OnRank:
    """What a rank of two brings back."""

    scored: dict[tuple[str, str], Scored]
    moved: dict[str, Moved]
    num_encoded: dict[str, int]
    hidden_rows: int  # tokens that a layer sees under sequence parallelism
    num_tokens: int
    without_pictures: Tensor  # logprobs
    one_picture: Scored
    parts: dict[tuple[float, int, bool], parts.Part]


def on_two(world: World) -> OnRank:
    """Every policy with every split of two ranks."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str], Scored] = {}
    encoded: dict[str, int] = {}
    for (name, make), (split, overrides) in itertools.product(POLICIES.items(), SPLIT.items()):
        policy = make()
        model = built(policy, world, **TP2, **overrides)
        batch = batch_of(policy)
        if model.tower.is_frozen:
            model.logprobs(batch, with_tower=True)  # the second time its features are there
        found[name, split] = scored(model, batch)
        encoded[split] = model.tower.num_encoded
    return OnRank(
        found,
        {name: moved(make(), world, **TP2) for name, make in POLICIES.items()},
        encoded,
        *layer_rows(world),
        without_pictures(qwen3(), world, **TP2),
        scored(
            built(qwen3(), world, **TP2, sequence_parallel=True), batch_with_one_picture(qwen3())
        ),
        parts.scored_all(cast("dist.ProcessGroup", dist.group.WORLD)),
    )


def layer_rows(world: World) -> tuple[int, int]:
    """How many tokens the second layer is given under sequence parallelism, and how many there are."""
    policy = qwen3()
    model = built(policy, world, **TP2, sequence_parallel=True)
    rows: list[int] = []
    layers: Sequence[nn.Module] = model.language.decoder.layers  # type: ignore[assignment]
    layers[1].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    batch = batch_of(policy)
    model.logprobs(batch, with_tower=True)
    return rows[0], len(batch.token_ids)


def without_pictures(policy: Policy, world: World, **overrides: object) -> Tensor:
    """Logprobs of a batch of text, with the tower off."""
    renderer = Renderer(policy)
    batch = collate([tiny.training_sample(renderer, 5, seed=9)], [1.0], renderer)
    return built(policy, world, **overrides).logprobs(batch, with_tower=False)
