"""Our decoder pass: equal to the model's own forward, rows of a batch independent, the sampler's distribution."""

from __future__ import annotations

import pytest
import torch

from polyturn.batching import collate
from polyturn.policy import vision
from polyturn.policy.forward import hidden_states, packed_states, token_distribution
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import Batch, TrainingSample
from tests.unit import tiny

PICTURES = (tiny.picture(), tiny.picture(64, 32, 90), tiny.picture(32, 48, 30))


def samples(renderer: Renderer) -> list[TrainingSample]:
    """No, one and two pictures; lengths differ."""
    return [
        tiny.training_sample(renderer, 4, seed=1),
        tiny.training_sample(renderer, 7, images=PICTURES[:1], seed=2),
        tiny.training_sample(renderer, 3, images=PICTURES[1:], seed=3),
    ]


def logits_of(policy: Policy, batch: Batch) -> torch.Tensor:
    """Of the packed tokens, [T, V]."""
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    hidden = packed_states(
        policy,
        batch,
        [encoded[index] for index in batch.image_rows],
    )
    return policy.model.lm_head(hidden)


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
@torch.no_grad()
def test_forward_equals_the_models_own(name: str, request: pytest.FixtureRequest) -> None:
    policy: Policy = request.getfixturevalue(name)
    renderer = Renderer(policy)
    reader = vision.PatchReader(policy)
    for sample in samples(renderer):
        batch = collate([sample], [1.0], renderer)
        read = [reader.read(image) for image in sample.images]
        is_pad = batch.token_ids == policy.family.image_token_id
        pictures = (
            {
                "pixel_values": torch.cat([patches for patches, _ in read]),
                "image_grid_thw": torch.stack([grid for _, grid in read]),
            }
            if read
            else {}
        )
        own = policy.model(
            input_ids=batch.token_ids[None],
            attention_mask=torch.ones_like(batch.token_ids)[None],
            mm_token_type_ids=is_pad.int()[None],
            **pictures,
        ).logits[0]
        torch.testing.assert_close(logits_of(policy, batch), own, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
@torch.no_grad()
def test_packed_samples_do_not_see_each_other(name: str, request: pytest.FixtureRequest) -> None:
    """GRPO-23: several sequences with pictures in one row score as they do alone (Megatron-Bridge #1776)."""
    policy: Policy = request.getfixturevalue(name)
    renderer = Renderer(policy)
    chosen = samples(renderer)
    together = logits_of(policy, collate(chosen, [1.0] * 3, renderer))
    alone = [logits_of(policy, collate([sample], [1.0], renderer)) for sample in chosen]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-5)


@torch.no_grad()
def test_another_picture_changes_the_logits(policy: Policy, renderer: Renderer) -> None:
    """A policy that does not see its pictures gives equal logits for both (slime #1803)."""
    first, second = tiny.picture(shade=0), tiny.picture(shade=200)
    logits = [
        logits_of(
            policy,
            collate([tiny.training_sample(renderer, 4, images=[image])], [1.0], renderer),
        )
        for image in (first, second)
    ]
    assert (logits[0] - logits[1]).abs().max() > 0.01


def test_only_image_pads_take_features_not_the_padding(policy: Policy, renderer: Renderer) -> None:
    """TOK-24: the padding id is another than the image pad's, and padding is never counted (lmdeploy #3285)."""
    family = policy.family
    assert family.padding_id != family.image_token_id
    assert policy.model.config.image_token_id == family.image_token_id
    batch = collate(samples(renderer)[1:2], [1.0], renderer)
    padding = torch.full((2,), family.padding_id)
    (features,) = vision.encode(policy, vision.PatchReader(policy), batch.images)
    with torch.no_grad():
        plain, padded = (
            hidden_states(policy, ids[None], positions[:, None], [features])
            for ids, positions in (
                (batch.token_ids, batch.position_ids),
                (
                    torch.cat([batch.token_ids, padding]),
                    torch.nn.functional.pad(batch.position_ids, (0, 2)),
                ),
            )
        )
    torch.testing.assert_close(padded[:, :-2], plain, rtol=0, atol=2e-5)


def test_pads_without_features_are_refused(policy: Policy, renderer: Renderer) -> None:
    batch = collate(samples(renderer)[1:2], [1.0], renderer)
    with pytest.raises(ValueError, match="3 image pads in the batch, but 0 visual tokens"):
        hidden_states(policy, batch.token_ids[None], batch.position_ids[:, None], [])


@torch.no_grad()
def test_spare_features_change_nothing(policy: Policy, renderer: Renderer) -> None:
    batch = collate(samples(renderer)[:1], [1.0], renderer)
    spare = vision.encode(policy, vision.PatchReader(policy), PICTURES)
    plain, with_spare = (packed_states(policy, batch, [], spare=extra) for extra in ([], spare))
    assert torch.equal(plain, with_spare)


@torch.no_grad()
def test_distribution_is_tempered_and_without_image_tokens(policy: Policy) -> None:
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    logits = policy.model.lm_head(hidden)
    banned = list(policy.family.banned_ids)
    expected = (logits / 0.6).double()
    expected[:, banned] = -torch.inf
    expected = expected.log_softmax(-1)
    ours = token_distribution(policy, hidden, 0.6)
    assert (ours[:, banned] == -torch.inf).all()
    kept = [token for token in range(logits.shape[1]) if token not in banned]
    torch.testing.assert_close(ours[:, kept].double(), expected[:, kept], rtol=0, atol=1e-5)
    assert torch.allclose(ours.exp().sum(-1), torch.ones(3))


def test_each_distinct_picture_is_encoded_once(policy: Policy, renderer: Renderer) -> None:
    sample = tiny.training_sample(renderer, 3, images=[PICTURES[0], PICTURES[1], PICTURES[0]])
    for share, rows in ((True, (0, 1, 0)), (False, (0, 1, 0, 0, 1, 0))):
        batch = collate([sample, sample], [1.0, 1.0], renderer, share_prompts=share)
        assert [image.sha256 for image in batch.images] == [i.sha256 for i in PICTURES[:2]]
        assert batch.image_rows == rows


@torch.no_grad()
def test_pictures_encode_alike_in_any_company(policy: Policy) -> None:
    reader = vision.PatchReader(policy, max_bytes=0)
    together = vision.encode(policy, reader, PICTURES)
    for image, features in zip(PICTURES, together, strict=True):
        (alone,) = vision.encode(policy, reader, [image])
        assert len(features.levels) == 2  # DeepStack of one layer
        for one, other in zip(features.levels, alone.levels, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_patches_are_read_once_while_they_are_kept(policy: Policy) -> None:
    reads = []

    class Counted(type(PICTURES[0])):  # type: ignore[misc]
        def read(self) -> bytes:
            reads.append(self.sha256)
            return super().read()

    first, second = (Counted(i.sha256, i.width, i.height, data=i.data) for i in PICTURES[:2])
    one = vision.PatchReader(policy).read(PICTURES[0])
    room = sum(tensor.untyped_storage().nbytes() for tensor in one)
    reader = vision.PatchReader(policy, max_bytes=room)
    assert torch.equal(reader.read(first)[0], reader.read(first)[0])
    reader.read(second)
    reader.read(first)
    assert reads == [first.sha256, second.sha256, first.sha256]
