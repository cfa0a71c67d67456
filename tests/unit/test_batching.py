"""Packing: every sample once, in its own place, siblings on one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyturn.batching import collate, loads, micro_batches, prompt_of
from polyturn.learner.scoring import trained
from polyturn.policy.attention import Packing
from polyturn.policy.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.types import Batch, Message, Span, TrainingSample
from tests.unit import tiny

PICTURES = (tiny.picture(), tiny.picture(64, 32, 90))


def siblings(
    renderer: Renderer, lengths: Sequence[int], *, images: Sequence[tiny.ImageRecord] = PICTURES[:1]
) -> list[TrainingSample]:
    """Replies of different lengths to one prompt."""
    made = [
        tiny.training_sample(renderer, length, images=images, advantage=float(n), seed=7)
        for n, length in enumerate(lengths)
    ]
    return [
        replace(
            sample, token_ids=np.where(sample.loss_mask, sample.token_ids + n, sample.token_ids)
        )
        for n, sample in enumerate(made)
    ]


def mixed(renderer: Renderer) -> list[TrainingSample]:
    """No, one and two pictures; two siblings apart."""
    first, second = siblings(renderer, (2, 6))
    return [
        first,
        tiny.training_sample(renderer, 3, advantage=5.0, seed=1),
        second,
        tiny.training_sample(renderer, 4, images=PICTURES, advantage=6.0, seed=2),
    ]


def tokens_of(batch: Batch, span: Span) -> torch.Tensor:
    return torch.from_numpy(span.indices())


@pytest.mark.parametrize("share", [True, False])
def test_every_sample_lies_whole_in_the_batch(renderer: Renderer, share: bool) -> None:
    samples = mixed(renderer)
    batch = collate(samples, [0.1, 0.2, 0.3, 0.4], renderer, share_prompts=share)
    for sample, span in zip(samples, batch.spans, strict=True):
        place = tokens_of(batch, span)
        grids = [renderer.grid(image) for image in sample.images]
        own = mrope_positions(sample.token_ids, renderer.family.image_token_id, grids)
        assert span.length == len(sample.token_ids)
        assert batch.token_ids[place].tolist() == sample.token_ids.tolist()
        assert batch.loss_mask[place].int().tolist() == sample.loss_mask.tolist()
        assert batch.logprobs[place].tolist() == sample.logprobs.tolist()
        assert batch.position_ids[:, place].tolist() == own.tolist()
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    for values, per_sample in (
        (batch.advantages, [0.0, 5.0, 1.0, 6.0]),
        (batch.weights, [0.1, 0.2, 0.3, 0.4]),
        (batch.sequence, [0, 1, 2, 3]),
    ):
        expected = np.repeat(np.array(per_sample, dtype=np.float32), counts)
        assert trained(batch, values).numpy().astype(np.float32).tolist() == expected.tolist()


def test_siblings_run_their_prompt_once(renderer: Renderer) -> None:
    samples = siblings(renderer, (2, 6, 3))
    prompt = int(np.argmax(samples[0].loss_mask))
    batch = collate(samples, [1.0] * 3, renderer)
    assert len(batch.token_ids) == prompt + 2 + 6 + 3
    assert batch.spans == (
        Span(0, prompt, prompt, prompt + 2),
        Span(0, prompt, prompt + 2, prompt + 8),
        Span(0, prompt, prompt + 8, prompt + 11),
    )
    assert batch.image_rows == (0,)
    apart = collate(samples, [1.0] * 3, renderer, share_prompts=False)
    assert len(apart.token_ids) == 3 * prompt + 11
    assert (apart.images, apart.image_rows) == (PICTURES[:1], (0, 0, 0))


def test_each_token_is_predicted_from_the_one_before_it_in_its_sample(renderer: Renderer) -> None:
    """GRPO-12: also the first token of a sibling, which stands far from its prompt."""
    samples = siblings(renderer, (2, 3))
    prompt = int(np.argmax(samples[0].loss_mask))
    batch = collate(samples, [1.0] * 2, renderer)
    last = prompt - 1
    assert batch.before.tolist() == [last, prompt, last, prompt + 2, prompt + 3]
    for sample, span in zip(samples, batch.spans, strict=True):
        ids = batch.token_ids[tokens_of(batch, span)]
        assert ids[last].item() == sample.token_ids[last]


def test_another_picture_or_text_is_another_prompt(renderer: Renderer) -> None:
    image_token = renderer.family.image_token_id
    one = tiny.training_sample(renderer, 2, images=PICTURES[:1], seed=7)
    darker = tiny.training_sample(renderer, 2, images=[tiny.picture(shade=9)], seed=7)
    assert np.array_equal(one.token_ids, darker.token_ids)
    assert prompt_of(one, image_token) != prompt_of(darker, image_token)
    assert len(collate([one, darker], [1.0] * 2, renderer).token_ids) == 2 * len(one.token_ids)


def test_a_picture_after_the_first_reply_is_not_the_prompts(renderer: Renderer) -> None:
    """Siblings part at the first sampled token, and each shows its own crop afterwards."""
    prompt = renderer.prompt([Message("user", (PICTURES[0], "x"))]).token_ids
    samples = []
    for crop in (tiny.picture(shade=1), tiny.picture(shade=2)):
        shown = renderer.observation(Message("tool", (crop, "ok"))).token_ids
        ids = [*prompt, 5, *shown, 6]
        mask = [0] * len(prompt) + [1] + [0] * len(shown) + [1]
        zeros = np.zeros(len(ids), dtype=np.float32)
        samples.append(
            TrainingSample(np.array(ids), np.array(mask, dtype=np.int8), zeros, (PICTURES[0], crop))
        )
    batch = collate(samples, [1.0] * 2, renderer)
    assert [image.sha256 for image in batch.images] == [
        image.sha256 for image in (PICTURES[0], samples[0].images[1], samples[1].images[1])
    ]
    assert batch.image_rows == (0, 1, 2)
    assert len(batch.token_ids) == 2 * len(samples[0].token_ids) - len(prompt)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_partial_picture_is_refused(renderer: Renderer, lost: int) -> None:
    """TOK-12: a prompt cut inside the image block never reaches the model (EasyR1 #76)."""
    whole = tiny.training_sample(renderer, 2, images=PICTURES[:1])
    last = int(np.flatnonzero(whole.token_ids == renderer.family.image_token_id)[-1])
    keep = np.ones(len(whole.token_ids), dtype=bool)
    keep[last + 1 - lost : last + 1] = False
    cut = TrainingSample(
        whole.token_ids[keep], whole.loss_mask[keep], whole.logprobs[keep], whole.images
    )
    with pytest.raises(ValueError, match=f"{3 - lost} image tokens, but the pictures have 3 cells"):
        collate([cut], [1.0], renderer)


def test_pads_and_pictures_of_a_sample_must_agree(renderer: Renderer) -> None:
    sample = tiny.training_sample(renderer, 2, images=[tiny.picture()])
    wrong = TrainingSample(sample.token_ids, sample.loss_mask, sample.logprobs, ())
    with pytest.raises(ValueError, match="3 image tokens, but the pictures have 0 cells"):
        collate([wrong], [1.0], renderer)


def test_first_position_is_never_scored(renderer: Renderer) -> None:
    """A mask bit there has no state before it (maxtext #2103)."""
    sample = TrainingSample(
        np.array([1, 2, 3]), np.array([1, 0, 1], dtype=np.int8), np.zeros(3, np.float32), ()
    )
    batch = collate([sample, sample], [1.0, 1.0], renderer)
    assert trained(batch, batch.token_ids).tolist() == [3, 3]
    assert batch.before.tolist() == [1, 4]


def test_no_samples_are_one_token_that_trains_nothing(renderer: Renderer) -> None:
    batch = collate([], [], renderer)
    assert batch.token_ids.tolist() == [renderer.family.padding_id]
    assert not batch.loss_mask.any()
    assert len(batch.before) == 0


def test_loads_count_tokens_and_patches(renderer: Renderer) -> None:
    """A picture of 1 x 3 visual tokens has 12 patches, one of 2 x 4 has 32."""
    (load,) = loads([tiny.training_sample(renderer, 5, images=PICTURES)], renderer)
    assert load.num_tokens == load.prompt.length + 5
    assert load.prompt.images == tuple(load.patches)
    assert list(load.patches.values()) == [12, 32]


def test_micro_batches_keep_siblings_together(renderer: Renderer) -> None:
    group = siblings(renderer, (2, 6, 3))
    other = [tiny.training_sample(renderer, 5, seed=n) for n in range(4)]
    samples = [group[0], *other, *group[1:]]
    budget = len(group[0].token_ids) + 12
    batches = micro_batches(samples, renderer, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert [0, 5, 6] in batches
    for batch in batches:
        packed = collate([samples[index] for index in batch], [1.0] * len(batch), renderer)
        assert len(packed.token_ids) <= budget


def test_packing_may_move_to_another_device(renderer: Renderer) -> None:
    batch = collate(mixed(renderer), [1.0] * 4, renderer).to(torch.device("meta"))
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10
    assert all(tensor.is_meta for tensor in tensors)
    assert Packing(batch.spans, torch.device("meta")).gather.is_meta
