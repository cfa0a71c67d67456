"""Pictures -> patches -> visual features; each distinct picture is decoded and encoded once."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from polyturn.policy.model import Family, Policy
from polyturn.policy.tensor_cache import TensorCache
from polyturn.policy.transfer import to_device
from polyturn.types import ImageRecord

ENCODE_CHUNK = 128  # pictures per call of the vision tower without gradient
CACHE_MB = 512  # of decoded pictures that a reader keeps, and of features that a store keeps


@dataclass(frozen=True)
class Features:
    """Visual features of one picture, N visual tokens: `levels[0]` [N, H] goes into the embeddings.

    Qwen3-VL adds one further level [N, H] after each of its first decoder layers (DeepStack, arXiv:2406.04334).
    """

    levels: tuple[torch.Tensor, ...]


class PatchReader:
    """Turns picture records into patches with the policy's image processor; keeps the latest."""

    def __init__(self, policy: Policy, max_bytes: int = CACHE_MB * 10**6) -> None:
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


def encode(
    policy: Policy,
    reader: PatchReader,
    images: Sequence[ImageRecord],
    *,
    chunk: int = ENCODE_CHUNK,
) -> list[Features]:
    """Run the vision tower over `images`, in order, `chunk` at a time; gradients flow if its parameters want them."""
    encoded: list[Features] = []
    device = policy.model.device
    for first in range(0, len(images), chunk):
        read = [reader.read(image) for image in images[first : first + chunk]]
        patches = to_device(torch.cat([patch for patch, _ in read]), device)
        grids = torch.stack([grid for _, grid in read])
        ends = torch.nn.functional.pad(grids.prod(-1).cumsum(0, dtype=torch.int32), (1, 0))
        # on the host, as every block asks for the pictures' lengths: a GPU would have to finish each block first
        output = policy.model.model.get_image_features(
            patches, image_grid_thw=to_device(grids, device), cu_seqlens=ends
        )
        sizes = (grids.prod(-1) // policy.family.merge_size**2).tolist()
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        # transformers 5.24 gives every level a picture, 5.12 some as one tensor of all pictures
        split = [x.split(sizes) if isinstance(x, torch.Tensor) else x for x in levels]
        encoded += [Features(tuple(level)) for level in zip(*split, strict=True)]
    return encoded


class FeatureStore:
    """Features without gradient, each distinct picture encoded once while the tower's weights stay the same."""

    def __init__(
        self, policy: Policy, reader: PatchReader, max_bytes: int = CACHE_MB * 10**6
    ) -> None:
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
    """The vision tower as training sees it: trained with the rest, or frozen and then run once per picture.

    With `is_collective` (its weights are trained and sharded over ranks) every call of `features` runs the tower
    exactly once, so that ranks stay in step whatever pictures they have; a rank that has none runs a blank one. A
    frozen tower is whole on every rank.
    """

    def __init__(
        self, policy: Policy, *, cache_mb: int = CACHE_MB, is_collective: bool = False
    ) -> None:
        self._policy = policy
        self._reader = PatchReader(policy, cache_mb * 10**6)
        self._store = FeatureStore(policy, self._reader, cache_mb * 10**6)
        self._is_collective = is_collective
        self._is_frozen = False

    @property
    def patch_cost(self) -> float:
        """What a patch costs in tokens where micro-batches are balanced; nothing where features are kept."""
        return 0.0 if self._is_frozen else patch_cost(self._policy)

    def freeze(self, is_frozen: bool) -> None:
        """Take the tower out of training, or back in."""
        self._is_frozen = is_frozen
        self._policy.model.model.visual.requires_grad_(not is_frozen)
        self._store.clear()

    def features(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        """Features of distinct pictures by hash, with gradient unless the tower is frozen.

        They may include those of the blank picture, which no sample shows: `score_batch` gives them weight 0.
        """
        if self._is_frozen:
            return self._store.encode(images)
        if self._is_collective and not images:
            images = [blank_picture(self._policy.family)]
        encoded = encode(self._policy, self._reader, images, chunk=max(1, len(images)))
        return {image.sha256: made for image, made in zip(images, encoded, strict=True)}


@functools.cache
def blank_picture(family: Family) -> ImageRecord:
    """The smallest picture that the vision tower takes, all white."""
    side = family.size_multiple
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (255, 255, 255)).save(buffer, format="PNG")
    return ImageRecord.from_png(buffer.getvalue(), side, side)


def patch_cost(policy: Policy) -> float:
    """What one patch costs in tokens: weights that it passes in the vision tower over those a token passes."""
    decoder = sum(p.numel() for p in policy.model.model.language_model.layers.parameters())
    tower = sum(p.numel() for p in policy.model.model.visual.blocks.parameters())
    return tower / decoder
