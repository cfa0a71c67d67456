"""Our decoder pass: equal to the model's own forward, rows of a batch independent, the sampler's distribution."""

from __future__ import annotations

import pytest
import torch

from polyturn import vision
from polyturn.batching import collate
from polyturn.forward import hidden_states, score, token_distribution
from polyturn.model import Policy
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
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    features = [encoded[index] for index in batch.image_rows]
    hidden = hidden_states(policy, batch.token_ids, batch.position_ids, features)
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
            input_ids=batch.token_ids,
            attention_mask=torch.ones_like(batch.token_ids),
            mm_token_type_ids=is_pad.int(),
            **pictures,
        ).logits
        torch.testing.assert_close(logits_of(policy, batch), own, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
@torch.no_grad()
def test_rows_of_a_padded_batch_do_not_see_each_other(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Several sequences with pictures in one batch score as they do alone (Megatron-Bridge #1776)."""
    policy: Policy = request.getfixturevalue(name)
    renderer = Renderer(policy)
    chosen = samples(renderer)
    together = logits_of(policy, collate(chosen, [1.0] * 3, renderer))
    for row, sample in enumerate(chosen):
        alone = logits_of(policy, collate([sample], [1.0], renderer))[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=0, atol=2e-5)


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
    """The padding id is another than the image pad's, and right padding is never counted (lmdeploy #3285)."""
    assert policy.family.padding_id != policy.family.image_token_id
    batch = collate(samples(renderer)[:2], [1.0, 1.0], renderer)
    padded = batch.token_ids == policy.family.padding_id
    assert padded[0].sum() == batch.token_ids.shape[1] - len(samples(renderer)[0].token_ids)
    assert int((batch.token_ids == policy.family.image_token_id).sum()) == 3
    logits_of(policy, batch)


def test_pads_without_features_are_refused(policy: Policy, renderer: Renderer) -> None:
    batch = collate(samples(renderer)[1:2], [1.0], renderer)
    with pytest.raises(ValueError, match="3 image pads in the batch, but 0 visual tokens"):
        hidden_states(policy, batch.token_ids, batch.position_ids, [])


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


@torch.no_grad()
def test_scores_are_the_targets_logprobs_and_the_entropy(policy: Policy) -> None:
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    distribution = token_distribution(policy, hidden, 1.0)
    scores = score(policy, hidden, torch.tensor([7, 9]), 1.0)
    assert torch.equal(scores.logprobs, torch.stack([distribution[0, 7], distribution[1, 9]]))
    probabilities = distribution.double().exp()
    entropy = -torch.where(probabilities > 0, probabilities * distribution, 0.0).sum(-1)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=0, atol=1e-5)


def test_each_distinct_picture_is_encoded_once(policy: Policy, renderer: Renderer) -> None:
    sample = tiny.training_sample(renderer, 3, images=[PICTURES[0], PICTURES[1], PICTURES[0]])
    batch = collate([sample, sample], [1.0, 1.0], renderer)
    assert [image.sha256 for image in batch.images] == [i.sha256 for i in PICTURES[:2]]
    assert batch.image_rows == (0, 1, 0, 0, 1, 0)


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
