"""Micro-batches: every sample once, within the budget, padded without mixing rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyturn.batching import collate, micro_batches
from polyturn.learner.scoring import trained
from polyturn.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from tests.unit import tiny


def of_length(length: int) -> TrainingSample:
    zeros = np.zeros(length)
    return TrainingSample(
        zeros.astype(np.int64), zeros.astype(np.int8), zeros.astype(np.float32), ()
    )


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 100))
def test_every_sample_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    batches = micro_batches([of_length(length) for length in lengths], budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) * longest <= budget or len(batch) == 1


def test_shortest_come_first_and_equal_lengths_keep_their_order() -> None:
    samples = [of_length(length) for length in (5, 2, 5, 3)]
    assert micro_batches(samples, 10) == [[1, 3], [0, 2]]


def test_rows_are_padded_right_and_positions_are_their_own(renderer: Renderer) -> None:
    image = tiny.picture()
    samples = [
        tiny.training_sample(renderer, 2, advantage=0.5, seed=1),
        tiny.training_sample(renderer, 6, images=[image], advantage=-1.0, seed=2),
    ]
    batch = collate(samples, [0.25, 0.75], renderer)
    family = renderer.family
    width = max(len(sample.token_ids) for sample in samples)
    assert batch.token_ids.shape == batch.loss_mask.shape == batch.logprobs.shape == (2, width)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        assert batch.token_ids[row, :length].tolist() == sample.token_ids.tolist()
        assert (batch.token_ids[row, length:] == family.padding_id).all()
        assert batch.loss_mask[row, :length].int().tolist() == sample.loss_mask.tolist()
        assert not batch.loss_mask[row, length:].any()
        assert not batch.logprobs[row, length:].any()
        grids = [renderer.grid(image) for image in sample.images]
        own = mrope_positions(sample.token_ids, family.image_token_id, grids)
        assert batch.position_ids[:, row, :length].tolist() == own.tolist()
        assert not batch.position_ids[:, row, length:].any()
    assert trained(batch, batch.advantages).tolist() == [0.5] * 2 + [-1.0] * 6
    assert trained(batch, batch.weights).tolist() == [0.25] * 2 + [0.75] * 6
    assert batch.images == (image,)


def test_pads_and_pictures_of_a_sample_must_agree(renderer: Renderer) -> None:
    sample = tiny.training_sample(renderer, 2, images=[tiny.picture()])
    wrong = TrainingSample(sample.token_ids, sample.loss_mask, sample.logprobs, ())
    with pytest.raises(ValueError, match="3 image tokens, but the pictures have 0 cells"):
        collate([wrong], [1.0], renderer)


def test_first_position_is_never_scored() -> None:
    """A mask bit there has no state before it (maxtext #2103)."""
    batch_mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[1.0, 2.0, 3.0]])

    class Masked:
        loss_mask = batch_mask

    assert trained(Masked(), values).tolist() == [3.0]  # type: ignore[arg-type]
