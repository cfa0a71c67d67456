"""The learner: one update against a reference, what it does not depend on, what stops it, what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyturn.batching import collate
from polyturn.learner.base import NonFiniteError
from polyturn.params import LossParams
from polyturn.policy import vision
from polyturn.policy.forward import hidden_states, token_distribution
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from tests.unit import tiny
from tests.unit.learner.scenarios import (
    PICTURES,
    gradients,
    learner_of,
    samples,
    update,
    weights_of,
)


def own_logprobs(policy: Policy, sample: TrainingSample, temperature: float = 1.0) -> list[float]:
    """Logprobs of the trained tokens, one sample alone, from the state before each token."""
    batch = collate([sample], [1.0], Renderer(policy))
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    with torch.no_grad():
        hidden = hidden_states(
            policy,
            batch.token_ids[None],
            batch.position_ids[:, None],
            [encoded[i] for i in batch.image_rows],
        )[0]
        distribution = token_distribution(policy, hidden, temperature)
    places = np.flatnonzero(sample.loss_mask)
    return [float(distribution[place - 1, sample.token_ids[place]]) for place in places]


def with_own_logprobs(
    policy: Policy, sample: TrainingSample, temperature: float = 1.0
) -> TrainingSample:
    logprobs = np.zeros(len(sample.token_ids), np.float32)
    logprobs[sample.loss_mask == 1] = own_logprobs(policy, sample, temperature)
    return replace(sample, logprobs=logprobs)


def test_gradients_equal_those_of_the_plain_objective(policy: Policy, renderer: Renderer) -> None:
    """On-policy and token-mean: minus the mean over all trained tokens of advantage x gradient of logprob."""
    learner = learner_of(policy)
    chosen = samples(renderer)
    stats = update(learner, chosen, is_on_policy=True)
    found = gradients(learner)
    reference = tiny.copy_of(policy)
    total = sum(int(sample.loss_mask.sum()) for sample in chosen)
    reader = vision.PatchReader(reference)
    for sample in chosen:
        batch = collate([sample], [1.0], renderer)
        encoded = vision.encode(reference, reader, batch.images)
        slots = [encoded[i] for i in batch.image_rows]
        hidden = hidden_states(
            reference, batch.token_ids[None], batch.position_ids[:, None], slots
        )[0]
        distribution = token_distribution(reference, hidden, 1.0)
        for place in np.flatnonzero(sample.loss_mask):
            target = distribution[place - 1, sample.token_ids[place]]
            (-sample.advantage * target / total).backward(retain_graph=True)
    for name, parameter in reference.model.named_parameters():
        assert parameter.grad is not None, name
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-12)
        assert error < 1e-4, name
    assert stats.num_tokens == total == 81


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_change_neither_gradients_nor_statistics(
    policy: Policy, renderer: Renderer, aggregation: str
) -> None:
    """Replies of 3 and 61 tokens in micro-batches of their own, or all in one (open-instruct #1161)."""
    loss = LossParams.model_validate({"aggregation": aggregation})
    one = learner_of(policy, loss=loss, micro_batch_tokens=1)
    all_ = learner_of(policy, loss=loss, micro_batch_tokens=100_000)
    chosen = [with_own_logprobs(policy, sample) for sample in samples(renderer)]
    chosen = [replace(s, logprobs=s.logprobs - 0.3 * s.loss_mask) for s in chosen]
    stats = [update(learner, chosen) for learner in (one, all_)]
    first, second = gradients(one), gradients(all_)
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        error = (gradient - second[name]).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-5, name
    assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-4)
    assert stats[0].loss_metrics == pytest.approx(stats[1].loss_metrics, rel=1e-4)
    assert stats[0].loss_metrics["pg_clipfrac"] > 0


def test_accumulation_over_four_micro_batches_is_one_update(
    policy: Policy, renderer: Renderer
) -> None:
    """Weights, moments and schedule see one step either way."""
    chosen = samples(renderer)
    all_, four = learner_of(policy), learner_of(policy, micro_batch_tokens=1)
    stats = [update(learner, chosen, is_on_policy=True) for learner in (all_, four)]
    assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-5)
    one, other = weights_of(all_), weights_of(four)
    before = weights_of(learner_of(policy))
    for name, value in one.items():
        moved = (value - before[name]).norm()
        assert (value - other[name]).norm() <= 0.02 * moved, name
    steps = {int(entry["step"]) for entry in four._optimizer.state.values()}
    assert steps == {1}


def test_recomputed_activations_give_the_same_gradients(policy: Policy, renderer: Renderer) -> None:
    chosen = samples(renderer)
    plain, again = learner_of(policy), learner_of(policy, activation_checkpointing=True)
    calls = 0
    layer = again.policy.model.model.language_model.layers[0]
    forward = layer.mlp.forward

    def counting(states: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(states)

    layer.mlp.forward = counting
    for learner in (plain, again):
        update(learner, chosen, is_on_policy=True)
    assert calls == 2  # once forward, once more in the backward pass
    wanted = gradients(plain)
    assert all(torch.equal(value, wanted[name]) for name, value in gradients(again).items())


def test_logprobs_are_those_of_each_sample_alone(policy: Policy, renderer: Renderer) -> None:
    learner, chosen = learner_of(policy, temperature=0.7), samples(renderer)
    for found, sample in zip(learner.logprobs(chosen), chosen, strict=True):
        assert (found.dtype, found.shape) == (np.float32, sample.logprobs.shape)
        assert not found[sample.loss_mask == 0].any()
        wanted = own_logprobs(policy, sample, 0.7)
        np.testing.assert_allclose(found[sample.loss_mask == 1], wanted, atol=1e-5)


def test_the_gap_to_the_sampler_is_a_mean_over_trained_tokens(
    policy: Policy, renderer: Renderer
) -> None:
    learner = learner_of(policy)
    chosen = [with_own_logprobs(policy, sample) for sample in samples(renderer)]
    assert learner.logprob_gap(chosen) < 1e-5
    shifted = [replace(chosen[0], logprobs=chosen[0].logprobs + 0.5), *chosen[1:]]
    assert learner.logprob_gap(shifted) == pytest.approx(0.5 * 3 / 81, rel=1e-3)
    assert learner.logprob_gap([]) == 0.0


def test_old_logprobs_may_be_the_learners_from_before_the_rollouts_first_update(
    policy: Policy, renderer: Renderer
) -> None:
    """Whatever the sampler said, ratios start at 1; the sampler's remain for the gap."""
    learner, chosen = learner_of(policy), samples(renderer)
    old = learner.logprobs(chosen)
    first = update(learner, chosen[:2], old_logprobs=old[:2]).loss_metrics
    assert first["ratio_error_max"] < 1e-5
    assert first["train_rollout_logprob_abs_diff"] > 1
    later = update(learner, chosen[2:], old_logprobs=old[2:]).loss_metrics
    assert 1e-4 < later["ratio_error"] < 1
    against_sampler = update(learner_of(policy), chosen[2:]).loss_metrics
    assert against_sampler["ratio_error"] > 1


def test_the_reference_stays_the_initial_policy(policy: Policy, renderer: Renderer) -> None:
    """KL 0 before the first update; later it is k3 between the initial and the present policy."""
    chosen = samples(renderer)
    learner = learner_of(policy, loss={"kl_coef": 0.1})
    initial = np.concatenate(learner.logprobs(chosen))
    first = update(learner, chosen, is_on_policy=True).loss_metrics
    assert first["kl_loss"] == first["ref_logprob_abs_diff_max"] == 0.0
    present = np.concatenate(learner.logprobs(chosen))
    x = (present - initial).astype(np.float64)
    second = update(learner, chosen, is_on_policy=True).loss_metrics
    assert second["kl_loss"] == pytest.approx((np.exp(-x) - 1 + x).sum() / 81, rel=1e-3)
    assert second["loss"] == pytest.approx(second["pg_loss"] + 0.1 * second["kl_loss"], rel=1e-6)


def test_without_kl_no_reference_is_loaded(policy: Policy) -> None:
    assert learner_of(policy)._reference is None
    assert learner_of(policy, loss={"kl_coef": 0.1}, lora={"rank": 2})._reference is not None


def test_an_update_without_pictures_leaves_a_trained_tower_alone(
    policy: Policy, renderer: Renderer
) -> None:
    """Its moments and its decay would move it, had it a gradient of zeros."""
    learner = learner_of(policy, weight_decay=0.1)
    update(learner, samples(renderer))
    before = weights_of(learner)
    update(learner, [tiny.training_sample(renderer, 9, advantage=1.0, seed=7)])
    changed = {n for n, value in weights_of(learner).items() if not torch.equal(value, before[n])}
    assert changed
    assert not any("visual" in name for name in changed)


def test_weights_are_shared_only_where_they_are_trained_as_they_are(policy: Policy) -> None:
    assert learner_of(policy).shares_weights
    assert not learner_of(policy, lora={"rank": 2}).shares_weights


def test_first_update_on_policy_has_ratio_exactly_one(policy: Policy, renderer: Renderer) -> None:
    """With padding on one sample, and whatever the sampler said (trl #454)."""
    stats = update(learner_of(policy), samples(renderer), is_on_policy=True)
    assert stats.loss_metrics["ratio_error_max"] == 0.0
    assert stats.loss_metrics["pg_clipfrac"] == 0.0
    assert stats.loss_metrics["train_rollout_logprob_abs_diff"] > 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ratio_is_one_against_a_sampler_with_the_same_weights(
    policy: Policy, renderer: Renderer, temperature: float
) -> None:
    """Sampled at 0.6, scored at 0.6 (trl #3029); dropout in the config stays off (trl #454)."""
    noisy = tiny.copy_of(policy)
    noisy.model.config.text_config.attention_dropout = 0.5
    learner = learner_of(noisy, temperature=temperature)
    chosen = [with_own_logprobs(policy, s, temperature) for s in samples(renderer)]
    stats = update(learner, chosen)
    assert stats.loss_metrics["ratio_error_max"] < 1e-5
    assert stats.loss_metrics["train_rollout_logprob_abs_diff_max"] < 1e-5
    if temperature != 1.0:
        wrong = learner_of(policy, temperature=1.0)
        assert update(wrong, chosen).loss_metrics["train_rollout_logprob_abs_diff"] > 0.01


def test_logprob_of_a_token_comes_from_the_position_before_it(policy: Policy) -> None:
    """A model that always predicts t + 1 after t scores 2, 3, 4 near 0 and nothing at the first (maxtext #2103)."""
    counting = tiny.copy_of(policy)
    decoder = counting.model.model.language_model
    with torch.no_grad():
        embeddings = torch.zeros_like(decoder.embed_tokens.weight)
        embeddings[:8, :8] = 100 * torch.eye(8)
        head = torch.zeros_like(embeddings)
        head[1:8, :7] = 100 * torch.eye(7)
        decoder.embed_tokens.weight = torch.nn.Parameter(embeddings)
        counting.model.lm_head.weight = torch.nn.Parameter(head)
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    sample = TrainingSample(
        np.array([1, 2, 3, 4]), np.ones(4, np.int8), np.zeros(4, np.float32), (), advantage=1.0
    )
    stats = update(learner_of(counting), [sample])
    assert stats.num_tokens == 3
    assert stats.loss_metrics["train_rollout_logprob_abs_diff_max"] < 1e-3


def test_samples_without_trained_tokens_add_nothing(policy: Policy, renderer: Renderer) -> None:
    """One of four fully masked (NeMo-RL #158)."""
    chosen = samples(renderer)
    masked = replace(chosen[3], loss_mask=np.zeros_like(chosen[3].loss_mask))
    with_it, without = learner_of(policy), learner_of(policy)
    first, second = update(with_it, [*chosen[:3], masked]), update(without, chosen[:3])
    assert first.num_tokens == second.num_tokens
    assert first.loss_metrics["loss"] == pytest.approx(second.loss_metrics["loss"], rel=1e-5)
    for name, gradient in gradients(without).items():
        torch.testing.assert_close(gradients(with_it)[name], gradient, rtol=1e-4, atol=1e-6)


def test_nothing_trained_at_all_takes_no_step(policy: Policy, renderer: Renderer) -> None:
    """All four fully masked: loss 0, finite, no step even with weight decay (NeMo-RL #158)."""
    learner = learner_of(policy, weight_decay=0.5)
    before = weights_of(learner)
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples(renderer)]
    stats = update(learner, masked)
    assert (stats.loss_metrics["loss"], stats.grad_norm, stats.num_tokens) == (0.0, 0.0, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())


@pytest.mark.parametrize("broken", ["advantage", "logprobs"])
def test_non_finite_numbers_stop_before_the_step(
    policy: Policy, renderer: Renderer, broken: str
) -> None:
    learner = learner_of(policy)
    before = weights_of(learner)
    chosen = samples(renderer)
    value: object = (
        float("nan") if broken == "advantage" else np.full_like(chosen[0].logprobs, -np.inf)
    )
    with pytest.raises(NonFiniteError, match=r"loss .*, gradient norm"):
        update(learner, [replace(chosen[0], **{broken: value}), *chosen[1:]])
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())
    assert gradients(learner) == {}
    assert update(learner, chosen).num_tokens == 81


def test_gradients_are_clipped_to_their_norm(policy: Policy, renderer: Renderer) -> None:
    learner = learner_of(policy, grad_clip=0.01)
    stats = update(learner, samples(renderer))
    norm = torch.stack([g.norm() for g in gradients(learner).values()]).norm()
    assert stats.grad_norm > 0.01
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_frozen_vision_keeps_its_weights_and_encodes_each_picture_once(
    policy: Policy, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(policy, freeze_vision=True, micro_batch_tokens=1)
    before = weights_of(learner)
    encoded: list[str] = []
    encode = vision.encode

    def counting(
        own: Policy, reader: vision.PatchReader, images: Sequence[object]
    ) -> list[vision.Features]:
        encoded.extend(image.sha256 for image in images)  # type: ignore[attr-defined]
        return encode(own, reader, images)  # type: ignore[arg-type]

    monkeypatch.setattr(vision, "encode", counting)
    for _ in range(2):
        update(learner, samples(renderer))
    assert sorted(encoded) == sorted(image.sha256 for image in PICTURES)
    changed = {
        name for name, value in weights_of(learner).items() if not torch.equal(value, before[name])
    }
    assert changed
    assert not any(name.startswith("model.visual") for name in changed)


def test_trained_vision_gets_gradients(policy: Policy, renderer: Renderer) -> None:
    learner = learner_of(policy)
    update(learner, samples(renderer))
    assert all(
        gradient.abs().sum() > 0
        for name, gradient in gradients(learner).items()
        if name.startswith("model.visual") and "norm" not in name and "bias" not in name
    )


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_exported_names_are_those_of_the_state_dict(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The tied head among them, with the embedding's values (prime-rl #2823)."""
    learner = learner_of(request.getfixturevalue(name))
    exported = dict(learner.export_weights())
    state = learner.policy.model.state_dict()
    assert exported.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in exported.items())
    head, embedding = (
        exported["lm_head.weight"],
        exported["model.language_model.embed_tokens.weight"],
    )
    assert head.data_ptr() == embedding.data_ptr()


def test_untied_head_is_exported_by_itself() -> None:
    """A head that is not the embedding stays its own tensor (sglang #18024)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    exported = dict(learner_of(untied).export_weights())
    head, embedding = (
        exported["lm_head.weight"],
        exported["model.language_model.embed_tokens.weight"],
    )
    assert not torch.equal(head, embedding)
