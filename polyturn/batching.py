"""Training samples -> padded micro-batches of similar length, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyturn.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.types import Batch, ImageRecord, TrainingSample


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int) -> list[list[int]]:
    """Indices of `samples` per micro-batch, shortest first; rows x longest row stays within `max_tokens`.

    A sample longer than the budget is alone in its micro-batch.
    """
    order = sorted(range(len(samples)), key=lambda index: (len(samples[index].token_ids), index))
    batches: list[list[int]] = []
    for index in order:
        length = len(samples[index].token_ids)
        if batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(
    samples: Sequence[TrainingSample], weights: Sequence[float], renderer: Renderer
) -> Batch:
    """Pad samples to one batch; `weights` are the loss weights of one token of each sample."""
    family = renderer.family
    rows, width = len(samples), max(len(sample.token_ids) for sample in samples)
    token_ids = torch.full((rows, width), family.padding_id)
    loss_mask = torch.zeros(rows, width, dtype=torch.bool)
    logprobs = torch.zeros(rows, width)
    positions = torch.zeros(3, rows, width, dtype=torch.int64)
    images: dict[str, ImageRecord] = {}
    place: dict[str, int] = {}
    image_rows: list[int] = []
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        grids = [renderer.grid(image) for image in sample.images]
        token_ids[row, :length] = torch.from_numpy(sample.token_ids)
        loss_mask[row, :length] = torch.from_numpy(sample.loss_mask).bool()
        logprobs[row, :length] = torch.from_numpy(sample.logprobs)
        positions[:, row, :length] = torch.from_numpy(
            mrope_positions(sample.token_ids, family.image_token_id, grids)
        )
        for image in sample.images:
            images.setdefault(image.sha256, image)
            image_rows.append(place.setdefault(image.sha256, len(place)))
    return Batch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        advantages=torch.tensor([sample.advantage for sample in samples])[:, None].expand(
            rows, width
        ),
        weights=torch.tensor(weights, dtype=torch.float32)[:, None].expand(rows, width),
        position_ids=positions,
        images=tuple(images.values()),
        image_rows=tuple(image_rows),
    )
