"""Pictures -> patches -> visual features; each distinct picture is decoded and encoded once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from polyturn.model import Policy
from polyturn.tensor_cache import TensorCache
from polyturn.types import ImageRecord

ENCODE_CHUNK = 128  # pictures per call of the vision tower
PATCH_BYTES = 512_000_000  # of decoded pictures that a reader keeps
FEATURE_BYTES = 512_000_000  # of features that a frozen tower's store keeps


@dataclass(frozen=True)
class Features:
    """Visual features of one picture, N visual tokens: `levels[0]` [N, H] goes into the embeddings.

    Qwen3-VL adds one further level [N, H] after each of its first decoder layers (DeepStack, arXiv:2406.04334).
    """

    levels: tuple[torch.Tensor, ...]


class PatchReader:
    """Turns picture records into patches with the policy's image processor; keeps the latest."""

    def __init__(self, policy: Policy, max_bytes: int = PATCH_BYTES) -> None:
        self._processor = policy.processor.image_processor
        self._kept = TensorCache(max_bytes)

    def read(self, image: ImageRecord) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches [P, C] float32 and grid [3] (1, rows, columns; in patches) of one picture."""
        kept = self._kept.get(image.sha256)
        if kept is None:
            with Image.open(io.BytesIO(image.read())) as picture:
                processed = self._processor(images=[picture.convert("RGB")], return_tensors="pt")
            kept = (processed["pixel_values"], processed["image_grid_thw"][0])
            self._kept.put(image.sha256, kept)
        patches, grid = kept
        return patches, grid


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


class FeatureStore:
    """Features without gradient, each distinct picture encoded once while the tower's weights stay the same."""

    def __init__(self, policy: Policy, reader: PatchReader, max_bytes: int = FEATURE_BYTES) -> None:
        self._policy = policy
        self._reader = reader
        self._kept = TensorCache(max_bytes)
        self.num_encoded = 0

    @torch.no_grad()
    def encode(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        """Features of `images` by hash."""
        features: dict[str, Features] = {}
        missing: dict[str, ImageRecord] = {}
        for image in images:
            kept = self._kept.get(image.sha256)
            if kept is None:
                missing[image.sha256] = image
            else:
                features[image.sha256] = Features(kept)
        encoded = encode(self._policy, self._reader, list(missing.values()))
        for sha256, made in zip(missing, encoded, strict=True):
            # Copies: the rows of one call share a storage that a single kept picture would hold on to.
            levels = tuple(level.clone() for level in made.levels)
            self._kept.put(sha256, levels)
            features[sha256] = Features(levels)
        self.num_encoded += len(missing)
        return features

    def clear(self) -> None:
        """Forget features of older weights."""
        self._kept.clear()


class TowerInTraining:
    """The vision tower as training sees it: trained with the rest, or frozen and then run once per picture."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._reader = PatchReader(policy)
        self._store = FeatureStore(policy, self._reader)
        self._is_frozen = False

    def freeze(self, is_frozen: bool) -> None:
        """Take the tower out of training, or back in."""
        self._is_frozen = is_frozen
        self._policy.model.model.visual.requires_grad_(not is_frozen)
        self._store.clear()

    def features(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        """Features of distinct pictures by hash, with gradient unless the tower is frozen."""
        if self._is_frozen:
            return self._store.encode(images)
        encoded = encode(self._policy, self._reader, images)
        return {image.sha256: made for image, made in zip(images, encoded, strict=True)}
