"""Adapters: what they leave alone, what they train, what is exported, and the reference without them."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer

from polyturn.learner import lora
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LoraParams, ParamsError, parse
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from tests.unit import tiny
from tests.unit.learner.scenarios import learner_of, samples, update, weights_of

DEFAULT = {"rank": 4, "alpha": 8.0}


def adapted(policy: Policy, *, seed: int = 0, **lora_params: object) -> FsdpLearner:
    """A learner with adapters on a frozen tower unless `vision_modules` says otherwise."""
    is_frozen = "vision_modules" not in lora_params
    return learner_of(
        policy, freeze_vision=is_frozen, lora={**DEFAULT, **lora_params}, lr=1e-2, seed=seed
    )


def layers(learner: FsdpLearner) -> dict[str, LoraLayer]:
    return {
        name: module
        for name, module in learner.policy.model.named_modules()
        if isinstance(module, LoraLayer)
    }


@pytest.mark.parametrize("build", ["policy", "policy_2_5"])
def test_new_adapters_change_nothing_and_stay_in_the_language_model(
    build: str, request: pytest.FixtureRequest
) -> None:
    """Qwen2.5-VL's tower has layers called gate_proj too."""
    policy: Policy = request.getfixturevalue(build)
    plain, learner = learner_of(policy), adapted(policy)
    chosen = samples(learner.renderer)
    for own, other in zip(learner.logprobs(chosen), plain.logprobs(chosen), strict=True):
        assert np.array_equal(own, other)
    names = set(layers(learner))
    assert len(names) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_only_adapters_are_trained_and_exported_weights_are_merged_as_peft_merges(
    policy: Policy, renderer: Renderer
) -> None:
    learner = adapted(policy)
    for _ in range(2):
        update(learner, samples(renderer))
    live = {name: p.detach().clone() for name, p in learner.policy.model.named_parameters()}
    exported = weights_of(learner)
    before = policy.model.state_dict()
    assert exported.keys() == before.keys()
    for name, parameter in learner.policy.model.named_parameters():
        assert torch.equal(parameter, live[name]), f"{name}: exporting changed a live weight"
        assert parameter.requires_grad == lora.is_adapter(name)
    merged = 0
    for name, layer in layers(learner).items():
        layer.merge(safe_merge=True)
        wanted = cast("torch.nn.Linear", layer.get_base_layer()).weight
        torch.testing.assert_close(exported[f"{name}.weight"], wanted, rtol=0, atol=0)
        assert not torch.equal(wanted, before[f"{name}.weight"])
        merged += 1
    changed = {name for name, value in exported.items() if not torch.equal(value, before[name])}
    assert len(changed) == merged == 14


def test_merged_weights_score_as_the_adapted_policy(policy: Policy, renderer: Renderer) -> None:
    learner = adapted(policy, rank=2, alpha=6.0, target_modules=["q_proj", "down_proj"])
    chosen = samples(renderer)
    for _ in range(3):
        update(learner, chosen)
    published = tiny.copy_of(policy)
    published.model.load_state_dict(weights_of(learner))
    for own, other in zip(
        learner.logprobs(chosen), learner_of(published).logprobs(chosen), strict=True
    ):
        np.testing.assert_allclose(own, other, atol=2e-5)


def test_the_reference_is_the_policy_without_its_adapters(
    policy: Policy, renderer: Renderer
) -> None:
    learner = learner_of(policy, lr=1e-2, lora=DEFAULT, loss={"kl_coef": 0.1})
    chosen, initial = samples(renderer), learner_of(policy).logprobs(samples(renderer))
    first = update(learner, chosen).loss_metrics
    assert first["ref_logprob_abs_diff_max"] == first["kl_loss"] == 0.0
    for _ in range(2):
        update(learner, chosen)
    with lora.switched_off(learner.policy.model):
        off = learner.logprobs(chosen)
    assert all(map(np.array_equal, off, initial))
    on = np.concatenate(learner.logprobs(chosen))
    apart = np.abs(on - np.concatenate(initial))
    number = sum(int(sample.loss_mask.sum()) for sample in chosen)
    metrics = update(learner, chosen).loss_metrics
    assert metrics["ref_logprob_abs_diff"] == pytest.approx(apart.sum() / number, rel=1e-4)
    assert metrics["kl_loss"] > 0


def test_vision_layers_get_adapters_on_request(policy: Policy, renderer: Renderer) -> None:
    learner = adapted(policy, target_modules=["o_proj"], vision_modules=["qkv", "linear_fc1"])
    update(learner, samples(renderer))
    before = policy.model.state_dict()
    changed = {n for n, value in weights_of(learner).items() if not torch.equal(value, before[n])}
    kinds = {name.split(".")[-2] for name in changed}
    assert kinds == {"o_proj", "qkv", "linear_fc1"}


@pytest.mark.parametrize("build", ["policy", "policy_2_5"])
def test_a_layer_that_shares_its_name_with_a_convolution_is_adapted_alone(
    build: str, request: pytest.FixtureRequest
) -> None:
    """unsloth-zoo #807: `proj` of the tower is also what it calls its patch embedding, which is no linear layer."""
    policy: Policy = request.getfixturevalue(build)
    learner = adapted(policy, target_modules=["o_proj"], vision_modules=["proj"])
    update(learner, samples(Renderer(policy)))
    before = policy.model.state_dict()
    changed = {n for n, value in weights_of(learner).items() if not torch.equal(value, before[n])}
    assert {name for name in changed if "visual" in name} == {
        f"model.visual.blocks.{index}.attn.proj.weight" for index in range(2)
    }


def test_initial_adapters_follow_the_seed_alone(policy: Policy) -> None:
    torch.manual_seed(1)
    one = adapted(policy)
    state = torch.get_rng_state()
    two, other = adapted(policy), adapted(policy, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first, same, different = (
        next(p for name, p in learner.parameters.items() if "lora_A" in name)
        for learner in (one, two, other)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


def test_unknown_layers_are_refused_by_name(policy: Policy) -> None:
    with pytest.raises(
        lora.LoraError, match=r"learner.lora.target_modules: .*'qkv_proj'; there are down_proj, .*"
    ):
        adapted(policy, target_modules=["q_proj", "qkv_proj"])
    with pytest.raises(lora.LoraError, match=r"vision_modules: .*visual is called 'q_proj'"):
        adapted(policy, vision_modules=["q_proj"])


def test_adapters_of_a_frozen_tower_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"lora.vision_modules .*freeze_vision to false"):
        parse({"learner": {"lora": {"vision_modules": ["qkv"]}}})
    assert LoraParams().rank == 16
