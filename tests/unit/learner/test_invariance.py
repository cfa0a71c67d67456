"""Loss and gradients depend on the samples alone: not on micro-batches, packing, order, sharing or chunks.

The reference runs every sample by itself through the model's own forward, pictures and all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from polyturn import batching
from polyturn.learner.fsdp import FsdpLearner
from polyturn.loss import LossInputs, policy_loss, token_weights
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.policy.vision import PatchReader
from polyturn.render import Renderer
from polyturn.types import ImageRecord, TrainingSample
from tests.unit import tiny

PICTURES = (tiny.picture(), tiny.picture(64, 32, 90), tiny.picture(32, 48, 30))
LOSSES = {
    "grpo": LossParams(),
    "gspo": LossParams(ratio_level="sequence", aggregation="sequence_mean"),
}


@dataclass(frozen=True)
class Outcome:
    """What an update computes."""

    loss: float
    gradients: dict[str, torch.Tensor]


def samples(renderer: Renderer) -> list[TrainingSample]:
    """A group of three with a picture, a group of two without, two more; replies of 3 to 61 tokens."""
    group = [
        tiny.training_sample(renderer, length, images=PICTURES[:1], advantage=advantage, seed=5)
        for length, advantage in ((3, 1.5), (61, -0.5), (20, -0.4))
    ]
    text = [
        tiny.training_sample(renderer, length, advantage=advantage, seed=6)
        for length, advantage in ((10, 0.7), (4, -0.7))
    ]
    others = [
        tiny.training_sample(renderer, 7, images=PICTURES[1:], advantage=-0.5, seed=7),
        tiny.training_sample(renderer, 12, images=PICTURES[:2], advantage=0.9, seed=8),
    ]
    return [with_own_reply(sample, n) for n, sample in enumerate([*group, *text, *others])]


def with_own_reply(sample: TrainingSample, number: int) -> TrainingSample:
    """Other tokens, an untrained stretch inside longer replies, and a sampler near the policy."""
    rng = np.random.default_rng(number)
    places = np.flatnonzero(sample.loss_mask)
    token_ids, mask = sample.token_ids.copy(), sample.loss_mask.copy()
    token_ids[places] = rng.integers(0, 250, len(places))
    if len(places) > 9:
        mask[places[4:7]] = 0
    return replace(sample, token_ids=token_ids, loss_mask=mask)


def own_logprobs(policy: Policy, sample: TrainingSample) -> torch.Tensor:
    """Of the trained tokens, by the model's own forward on this sample alone."""
    reader = PatchReader(policy)
    read = [reader.read(image) for image in sample.images]
    ids = torch.from_numpy(sample.token_ids)[None]
    shown: dict[str, torch.Tensor] = {}
    if read:
        shown["pixel_values"] = torch.cat([patches for patches, _ in read])
        shown["image_grid_thw"] = torch.stack([grid for _, grid in read])
    logits = policy.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == policy.family.image_token_id).int(),
        **shown,
    ).logits[0]
    logits[:, list(policy.family.banned_ids)] = -torch.inf
    before = torch.from_numpy(np.flatnonzero(sample.loss_mask) - 1)
    return logits.log_softmax(-1)[before].gather(-1, ids[0, before + 1, None])[:, 0]


@functools.cache
def prepared(name: str) -> tuple[Policy, list[TrainingSample]]:
    """A policy and samples whose sampler was it, up to noise."""
    policy = tiny.qwen3() if name == "qwen3_vl" else tiny.qwen2_5()
    made: list[TrainingSample] = []
    for number, sample in enumerate(samples(Renderer(policy))):
        noise = np.random.default_rng(number).normal(0, 0.15, int(sample.loss_mask.sum()))
        logprobs = np.zeros(len(sample.token_ids), dtype=np.float32)
        with torch.no_grad():
            logprobs[sample.loss_mask == 1] = own_logprobs(policy, sample).numpy() + noise
        made.append(replace(sample, logprobs=logprobs))
    return policy, made


@functools.cache
def reference(name: str, kind: str) -> Outcome:
    """One sample after another, unpacked and unshared."""
    policy, chosen = prepared(name)
    loss = LOSSES[kind]
    own = tiny.copy_of(policy)
    lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in chosen])
    total = 0.0
    for sample, weight in zip(chosen, token_weights(lengths, loss).tolist(), strict=True):
        logprobs = own_logprobs(own, sample)
        sampled = torch.from_numpy(sample.logprobs[sample.loss_mask == 1])
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=sampled,
            sampler_logprobs=sampled,
            reference_logprobs=None,
            entropy=torch.zeros_like(sampled),
            advantages=torch.full_like(sampled, sample.advantage),
            weights=torch.full_like(sampled, weight),
            sequence=torch.zeros(len(sampled), dtype=torch.int64),
        )
        value = policy_loss(inputs, loss).loss
        value.backward()
        total += value.item()
    return Outcome(total, gradients(own))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }


def update(
    name: str,
    kind: str = "grpo",
    *,
    order: Sequence[int] | None = None,
    **params: object,
) -> Outcome:
    """What the learner computes."""
    policy, chosen = prepared(name)
    own = tiny.copy_of(policy)
    learner = FsdpLearner(
        own,
        Renderer(own),
        LearnerParams.model_validate(
            {"freeze_vision": False, "grad_clip": 1e9, "micro_batch_tokens": 4096, **params}
        ),
        LOSSES[kind],
        1.0,
    )
    taken = [chosen[index] for index in order] if order else chosen
    stats = learner.update(taken, lr_scale=1.0, is_on_policy=False)
    return Outcome(stats.loss_metrics["loss"], gradients(own))


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-7)
    assert found.gradients.keys() == wanted.gradients.keys()
    for key, gradient in wanted.gradients.items():
        error = (found.gradients[key] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{key}: {error:.1e}"


CASES: dict[str, dict[str, object]] = {
    "one micro-batch": {},
    "micro-batches of one sample": {"micro_batch_tokens": 1},
    "two micro-batches": {"micro_batch_tokens": 110},
    "four micro-batches, of about two samples": {"micro_batch_tokens": 75},
    "permuted": {"order": (4, 0, 6, 2, 5, 1, 3)},
    "permuted, in micro-batches": {"order": (4, 0, 6, 2, 5, 1, 3), "micro_batch_tokens": 110},
    "logits in chunks": {"logit_chunk_tokens": 16},
    "activation checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_loss_and_gradients_are_those_of_each_sample_alone(name: str, case: str) -> None:
    assert_equal(update(name, **CASES[case]), reference(name, "grpo"))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["one micro-batch", "permuted, in micro-batches"])
def test_ratios_of_whole_sequences_do_not_mix_samples(case: str) -> None:
    """GSPO: the mean over a sample's tokens needs to know which sample a packed token is of."""
    assert_equal(update("qwen3_vl", "gspo", **CASES[case]), reference("qwen3_vl", "gspo"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_shared_and_repeated_prompts_give_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyturn.learner import shares  # noqa: PLC0415

    repeated = functools.partial(batching.collate, share_prompts=False)
    monkeypatch.setattr(shares, "collate", repeated)
    assert_equal(update(name), reference(name, "grpo"))


def test_cases_split_as_they_say() -> None:
    policy, chosen = prepared("qwen3_vl")
    renderer = Renderer(policy)
    numbers = {
        budget: len(batching.micro_batches(chosen, renderer, budget, patch_cost=0.0))
        for budget in (1, 75, 110, 4096)
    }
    assert numbers[1] == 7
    assert numbers[4096] == 1
    assert (numbers[110], numbers[75]) == (2, 4)


def test_fifteen_times_as_many_tokens_in_one_micro_batch_weigh_the_same() -> None:
    """GRPO-15: denominators are the update's, not the micro-batch's (open-instruct #1161)."""
    policy, _ = prepared("qwen3_vl")
    renderer = Renderer(policy)
    pair = [
        tiny.training_sample(renderer, 3, images=PICTURES[:1], advantage=1.0, seed=1),
        tiny.training_sample(renderer, 61, advantage=-1.0, seed=2),
    ]
    found: list[dict[str, torch.Tensor]] = []
    for budget in (1, 4096):
        own = tiny.copy_of(policy)
        params = LearnerParams(freeze_vision=False, grad_clip=1e9, micro_batch_tokens=budget)
        learner = FsdpLearner(own, Renderer(own), params, LossParams(), 1.0)
        learner.update(pair, lr_scale=1.0, is_on_policy=True)
        found.append(gradients(own))
    for key, gradient in found[1].items():
        assert (found[0][key] - gradient).norm() / gradient.norm() < 1e-5, key


def shown(images: Sequence[ImageRecord]) -> set[str]:
    return {image.sha256 for image in images}


def test_each_distinct_picture_of_a_micro_batch_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polyturn.policy import vision  # noqa: PLC0415

    calls: list[list[str]] = []
    encode = vision.encode

    def counting(
        policy: Policy, reader: PatchReader, images: Sequence[ImageRecord], **options: int
    ) -> list[vision.Features]:
        calls.append([image.sha256 for image in images])
        return encode(policy, reader, images, **options)

    monkeypatch.setattr(vision, "encode", counting)
    update("qwen3_vl")
    assert len(calls) == 1
    assert sorted(calls[0]) == sorted(shown(PICTURES))
