"""The Megatron policy is the Hugging Face one: logprobs, entropies and every gradient, in one process and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from polyturn.batching import collate
from polyturn.learner.megatron import scores
from polyturn.learner.scoring import score_batch
from polyturn.policy import vision
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import Batch
from polyturn.world import ONE
from tests.unit.learner.megatron.cases import (
    POLICIES,
    SETTINGS,
    SPLIT,
    TEMPERATURE,
    Moved,
    OnRank,
    Scored,
    Tensors,
    batch_of,
    batch_with_one_picture,
    built,
    loss_of,
    moved,
    qwen3,
    qwen3_untied,
    scored,
    without_pictures,
)
from tests.unit.learner.scenarios import samples


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """The groups of one process that a Megatron policy makes go with this module."""
    yield
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Reference:
    """What Hugging Face's modules give."""

    policy: Policy
    batch: Batch
    scored: Scored


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    policies = {name: make() for name, make in POLICIES.items()}
    return {name: reference(policy, batch_of(policy)) for name, policy in policies.items()}


def reference(policy: Policy, batch: Batch) -> Reference:
    tower = vision.TowerInTraining(policy)
    tower.freeze(False)
    features = tower.features(batch.images)
    own = score_batch(policy, batch, features, TEMPERATURE, with_entropy_gradient=True)
    loss_of(own.logprobs, own.entropy).backward()
    parameters = policy.model.named_parameters(remove_duplicate=False)
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    return Reference(policy, batch, Scored(own.logprobs.detach(), own.entropy.detach(), gradients))


def assert_equal(found: Scored, wanted: Scored, *, with_tower: bool) -> None:
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=0, atol=2e-5)
    expected = {
        name: gradient
        for name, gradient in wanted.gradients.items()
        if with_tower or "visual" not in name
    }
    assert found.gradients.keys() == expected.keys()
    errors = {name: error(found.gradients[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-6))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", POLICIES)
def test_scores_and_gradients_are_those_of_hugging_face(
    references: dict[str, Reference], name: str, setting: str
) -> None:
    wanted = references[name]
    model = built(wanted.policy, ONE, **SETTINGS[setting])
    found = scored(model, wanted.batch)
    assert_equal(found, wanted.scored, with_tower=not model.tower.is_frozen)


@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("name", POLICIES)
def test_two_ranks_that_share_weights_give_scores_and_gradients_of_hugging_face(
    references: dict[str, Reference], two: list[OnRank], name: str, split: str
) -> None:
    for rank in two:
        assert_equal(
            rank.scored[name, split],
            references[name].scored,
            with_tower="frozen" not in split,
        )


def test_the_batch_of_these_tests_is_a_hard_one() -> None:
    batch = batch_of(qwen3())
    assert len(batch.token_ids) % 2 == 1, "sequence parallelism has to pad"
    assert len({span.length for span in batch.spans}) == len(batch.spans)
    assert any(span.prompt_stop < span.start for span in batch.spans), "a shared prompt"
    assert len(batch.image_rows) > len(batch.images) > 1
    assert qwen3_untied().model.config.text_config.vocab_size % 2 == 1, "two ranks have to pad"


def test_logits_are_those_of_hugging_faces_own_forward_pass() -> None:
    """Of one sample with two pictures, all tokens, through transformers' own inputs."""
    policy = qwen3()
    renderer = Renderer(policy)
    batch = collate(samples(renderer)[1:2], [1.0], renderer)
    read = [vision.PatchReader(policy).read(image) for image in batch.images]
    with torch.no_grad():
        wanted = policy.model(
            input_ids=batch.token_ids[None],
            pixel_values=torch.cat([patches for patches, _ in read]),
            image_grid_thw=torch.stack([grid for _, grid in read]),
            mm_token_type_ids=(batch.token_ids == policy.family.image_token_id).long()[None],
        ).logits[0]
        model = built(policy, ONE)
        features = model.tower.features(batch.images)
        levels = zip(*(features[image.sha256].levels for image in batch.images), strict=True)
        hidden = model._decoder.states(batch, [torch.cat(level) for level in levels])
        found = hidden @ policy.model.lm_head.weight.T
    assert len(batch.images) == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_pads_without_features_are_an_error() -> None:
    model = built(qwen3(), ONE)
    with pytest.raises(ValueError, match="image pads in the batch, but 0 visual tokens"):
        model._decoder.states(batch_of(model.policy), [])


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_layers_run_a_second_time_in_the_backward_pass_only_on_request(is_asked_for: bool) -> None:
    """Decoder layers and vision blocks, by a norm inside of each."""
    model = built(qwen3(), ONE, activation_checkpointing=is_asked_for)
    ran: list[nn.Module] = []
    decoder_layers = cast("nn.ModuleList", model.language.decoder.layers)
    blocks = cast("nn.ModuleList", model.visual.blocks)
    inside = [layer.pre_mlp_layernorm for layer in decoder_layers] + [b.norm1 for b in blocks]
    norms = cast("list[nn.Module]", inside)
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, _: ran.append(module))
    scores_ = model.score(batch_of(model.policy), with_tower=True)
    ran.clear()
    scores_.logprobs.sum().backward()
    assert {ran.count(norm) for norm in norms} == {int(is_asked_for)}


@pytest.mark.full  # tracing takes half a minute
@pytest.mark.parametrize("overrides", [{}, {"activation_checkpointing": True}])
def test_a_compiled_policy_gives_the_gradients_of_an_eager_one(
    references: dict[str, Reference],
    overrides: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced but not lowered to kernels, which takes minutes on a CPU."""
    compiled: list[object] = []

    def unfused(function: Callable[..., object], *, dynamic: bool) -> Callable[..., object]:
        compiled.append(function)
        return original(function, dynamic=dynamic, backend="eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", unfused)
    scores.compiled.cache_clear()
    wanted = references["Qwen3-VL untied"]
    model = built(wanted.policy, ONE, compile=True, **overrides)
    assert_equal(scored(model, wanted.batch), wanted.scored, with_tower=True)
    scores.compiled.cache_clear()
    assert len(compiled) == 2 + 2 + 3, "decoder layers, vision blocks, functions of the logits"


def test_the_language_model_of_the_policy_leaves_its_shapes_alone() -> None:
    """Or each rank of a host would hold all of it a second time."""
    model = built(qwen3(), ONE)
    left = {name: p.device.type for name, p in model.policy.model.named_parameters()}
    assert {device for name, device in left.items() if "visual" not in name} == {"meta"}
    assert {device for name, device in left.items() if "visual" in name} == {"cpu"}
    assert model.policy.model.device.type == "cpu", "where the tower's inputs go"


def test_bfloat16_is_near_float32(references: dict[str, Reference]) -> None:
    """Weights are rounded once, rotary angles never."""
    wanted = references["Qwen3-VL untied"]
    model = built(wanted.policy, ONE, precision="bfloat16")
    parameters = [*model.language.parameters(), *model.visual.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.visual.buffers()} == {torch.float32}
    found = scored(model, wanted.batch)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    assert 1e-5 < (found.logprobs - wanted.scored.logprobs).abs().mean() < 0.1
    one, two = (
        torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])
        for tensors in (found.gradients, wanted.scored.gradients)
    )
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.99


# -- what two ranks do ----------------------------------------------------------------------------------------


def test_each_rank_runs_the_tower_on_a_part_of_the_pictures(two: list[OnRank]) -> None:
    """Two distinct pictures: one for each rank; a frozen tower keeps what it has encoded."""
    for rank in two:
        assert rank.num_encoded == dict.fromkeys(SPLIT, 1)


def test_a_rank_that_has_no_picture_to_encode_is_no_exception(two: list[OnRank]) -> None:
    policy = qwen3()
    wanted = reference(policy, batch_with_one_picture(policy)).scored
    for rank in two:
        assert_equal(rank.one_picture, wanted, with_tower=True)


def test_sequence_parallelism_splits_tokens(two: list[OnRank]) -> None:
    for rank in two:
        assert rank.hidden_rows == (rank.num_tokens + 1) // 2


def test_a_batch_of_text_does_without_the_tower(two: list[OnRank]) -> None:
    alone = without_pictures(qwen3(), ONE)
    assert len(alone) == 5
    for rank in two:
        torch.testing.assert_close(rank.without_pictures, alone, rtol=0, atol=2e-5)


# -- weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_weights_come_back_bit_for_bit(two: list[OnRank], name: str) -> None:
    """At TP 1 and 2, from every rank, with and without a tied head."""
    policy = POLICIES[name]()
    wanted = dict(policy.model.named_parameters(remove_duplicate=False))
    for way in (moved(policy, ONE), *(rank.moved[name] for rank in two)):
        assert_same(way, wanted)


def assert_same(way: Moved, wanted: Tensors) -> None:
    for found in (way.exported, way.reloaded):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def test_an_export_holds_one_whole_tensor_at_a_time(two: list[OnRank]) -> None:
    for rank in two:
        assert {way.num_alive for way in rank.moved.values()} == {1}


def test_tied_names_come_one_after_the_other() -> None:
    names = list(moved(qwen3(), ONE).exported)
    place = names.index("model.language_model.embed_tokens.weight")
    assert names[place + 1] == "lm_head.weight"
