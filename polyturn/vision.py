"""Pictures -> patches -> visual features; each distinct picture is decoded and encoded once."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from polyturn.model import Policy
from polyturn.types import ImageRecord

ENCODE_CHUNK = 128  # pictures per call of the vision tower


@dataclass(frozen=True)
class Features:
    """Visual features of one picture, N visual tokens: `levels[0]` [N, H] goes into the embeddings.

    Qwen3-VL adds one further level [N, H] after each of its first decoder layers (DeepStack, arXiv:2406.04334).
    """

    levels: tuple[torch.Tensor, ...]


class PatchReader:
    """Turns picture records into patches with the policy's image processor; keeps the latest `capacity`."""

    def __init__(self, policy: Policy, capacity: int = 1024) -> None:
        self._processor = policy.processor.image_processor
        self._capacity = capacity
        self._kept: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def read(self, image: ImageRecord) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches [P, C] float32 and grid [3] (1, rows, columns; in patches) of one picture."""
        if image.sha256 in self._kept:
            self._kept.move_to_end(image.sha256)
            return self._kept[image.sha256]
        with Image.open(io.BytesIO(image.read())) as picture:
            processed = self._processor(images=[picture.convert("RGB")], return_tensors="pt")
        patches = (processed["pixel_values"], processed["image_grid_thw"][0])
        self._kept[image.sha256] = patches
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return patches


def encode(policy: Policy, reader: PatchReader, images: Sequence[ImageRecord]) -> list[Features]:
    """Run the vision tower over `images`, in order; gradients flow if the tower's parameters want them."""
    encoded: list[Features] = []
    device = next(policy.model.parameters()).device
    for first in range(0, len(images), ENCODE_CHUNK):
        read = [reader.read(image) for image in images[first : first + ENCODE_CHUNK]]
        patches = torch.cat([patch for patch, _ in read]).to(device)
        grids = torch.stack([grid for _, grid in read]).to(device)
        output = policy.model.model.get_image_features(patches, image_grid_thw=grids)
        levels = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        encoded += [Features(tuple(level)) for level in zip(*levels, strict=True)]
    return encoded
