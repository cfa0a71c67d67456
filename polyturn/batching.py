"""Training samples -> packed micro-batches.

Samples lie end to end without padding. Siblings share their prompt, which runs once: what stands before the first
trained token is the same for all of them, and so are its states, because attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from polyturn.balance import Load, Prompt, partition
from polyturn.policy.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.types import Batch, ImageRecord, Span, TrainingSample


def prompt_length(sample: TrainingSample) -> int:
    """Number of tokens before the first trained one; 0 if none is trained."""
    return int(np.argmax(sample.loss_mask)) if len(sample.loss_mask) else 0


def prompt_of(sample: TrainingSample, image_token_id: int) -> Prompt:
    """What siblings share: the prompt's tokens and pictures. Each block of pads is one picture."""
    prompt = sample.token_ids[: prompt_length(sample)]
    is_pad = prompt == image_token_id
    num_images = int((is_pad & ~np.concatenate([[False], is_pad[:-1]])).sum()) if len(prompt) else 0
    images = tuple(image.sha256 for image in sample.images[:num_images])
    return Prompt(prompt.tobytes(), images, len(prompt))


def loads(samples: Sequence[TrainingSample], renderer: Renderer) -> list[Load]:
    """What each sample costs: its tokens and the patches of its pictures."""
    cells_to_patches = renderer.family.merge_size**2
    patches = {
        image.sha256: int(np.prod(renderer.grid(image))) * cells_to_patches
        for sample in samples
        for image in sample.images
    }
    return [
        Load(
            len(sample.token_ids),
            prompt_of(sample, renderer.family.image_token_id),
            {image.sha256: patches[image.sha256] for image in sample.images},
        )
        for sample in samples
    ]


def micro_batches(
    samples: Sequence[TrainingSample],
    renderer: Renderer,
    max_tokens: int,
    *,
    patch_cost: float = 0.0,
) -> list[list[int]]:
    """Indices of `samples` per micro-batch of a single rank; see `balance.partition`."""
    (own,) = partition(
        loads(samples, renderer), num_ranks=1, max_tokens=max_tokens, patch_cost=patch_cost
    )
    return own


def collate(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    renderer: Renderer,
    *,
    share_prompts: bool = True,
) -> Batch:
    """Pack samples in their order; `weights` are the loss weights of one token of each sample.

    Without samples the batch is one padding token that trains nothing: a rank that has run out of samples still
    takes part in every collective of its forward and backward pass.

    Raises:
        ValueError: the image tokens of a sample are not those of its pictures.
    """
    if not samples:
        samples, weights = [_idle(renderer)], [0.0]
    packer = _Packer(renderer, share_prompts)
    for sample in samples:
        packer.add(sample)
    sizes = torch.tensor([span.stop - span.start for span in packer.owned])

    def spread(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes)

    token_ids = _join([s.token_ids[skip:] for s, skip in zip(samples, packer.skipped, strict=True)])
    loss_mask = _join(packer.masks)
    return Batch(
        token_ids=token_ids,
        sequence=torch.arange(len(samples)).repeat_interleave(sizes),
        loss_mask=loss_mask,
        logprobs=_join(
            [s.logprobs[skip:] for s, skip in zip(samples, packer.skipped, strict=True)]
        ),
        advantages=spread([sample.advantage for sample in samples]),
        weights=spread(weights),
        position_ids=torch.from_numpy(np.concatenate(packer.positions, axis=1)),
        before=_join(packer.before),
        trained=loss_mask.nonzero()[:, 0],
        pads=(token_ids == renderer.family.image_token_id).nonzero()[:, 0],
        images=tuple(packer.images.values()),
        image_rows=tuple(packer.image_rows),
        spans=tuple(packer.spans),
    )


@dataclass
class _Packer:
    """Lays samples end to end; `owned` are the tokens that each sample adds, after the `skipped` ones."""

    renderer: Renderer
    is_sharing: bool
    spans: list[Span] = field(default_factory=list[Span])
    owned: list[Span] = field(default_factory=list[Span])
    skipped: list[int] = field(default_factory=list[int])
    masks: list[np.ndarray] = field(default_factory=list[np.ndarray])
    before: list[np.ndarray] = field(default_factory=list[np.ndarray])
    positions: list[np.ndarray] = field(default_factory=list[np.ndarray])
    images: dict[str, ImageRecord] = field(default_factory=dict[str, ImageRecord])
    image_rows: list[int] = field(default_factory=list[int])
    _prompts: dict[Prompt, Span] = field(default_factory=dict[Prompt, Span])
    _places: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, sample: TrainingSample) -> None:
        """Lay one sample."""
        image_token_id = self.renderer.family.image_token_id
        prompt = prompt_of(sample, image_token_id)
        found = self._prompts.get(prompt) if self.is_sharing and prompt.length else None
        start = self.owned[-1].stop if self.owned else 0
        skipped = prompt.length if found else 0
        stop = start + len(sample.token_ids) - skipped
        if found:
            span = Span(found.prompt_start, found.prompt_stop, start, stop)
        elif self.is_sharing:
            span = Span(start, start + prompt.length, start + prompt.length, stop)
            self._prompts[prompt] = span
        else:
            span = Span(start, start, start, stop)
        self.spans.append(span)
        self.owned.append(Span(start, start, start, stop))
        self.skipped.append(skipped)
        self._score(sample, span, skipped)
        grids = [self.renderer.grid(image) for image in sample.images]
        self.positions.append(mrope_positions(sample.token_ids, image_token_id, grids)[:, skipped:])
        for image in sample.images[len(prompt.images) if found else 0 :]:
            self.images.setdefault(image.sha256, image)
            self.image_rows.append(self._places.setdefault(image.sha256, len(self._places)))

    def _score(self, sample: TrainingSample, span: Span, skipped: int) -> None:
        """Mark the trained tokens, and the token before each; a sample's first token is never scored."""
        mask = sample.loss_mask == 1
        mask[:1] = False
        self.masks.append(mask[skipped:])
        self.before.append(span.indices()[:-1][mask[1:]])


def _idle(renderer: Renderer) -> TrainingSample:
    return TrainingSample(
        token_ids=np.array([renderer.family.padding_id], dtype=np.int64),
        loss_mask=np.zeros(1, dtype=np.int8),
        logprobs=np.zeros(1, dtype=np.float32),
        images=(),
    )


def _join(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
