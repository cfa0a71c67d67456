"""The vision tower of ranks that train on the same pictures: each encodes a part of them, and all get the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from polyturn.policy.model import Policy
from polyturn.policy.tensor_cache import TensorCache
from polyturn.policy.vision import Features, PatchReader, encode
from polyturn.types import ImageRecord


class SplitTower:
    """Runs a policy's tower, whole on every rank, over the pictures that a tensor-parallel group shares.

    Every rank of the group calls `features` with the same pictures at the same time. The tower's gradients are then
    those of the rank's own pictures: whoever steps sums them over the group. A frozen tower encodes a picture once.

    Args:
        policy: its `model.model.visual` is the tower.
        num_tokens: how many visual tokens a picture has.
        group: the tensor-parallel group.
        cache_mb: of decoded pictures that are kept, and of a frozen tower's features.
        is_frozen: nothing of the tower is trained.
    """

    def __init__(
        self,
        policy: Policy,
        num_tokens: Callable[[ImageRecord], int],
        group: dist.ProcessGroup,
        *,
        cache_mb: int,
        is_frozen: bool,
    ) -> None:
        self._policy = policy
        self._num_tokens = num_tokens
        self._group = group
        self._reader = PatchReader(policy, cache_mb * 10**6)
        self._kept = TensorCache(cache_mb * 10**6)
        self.is_frozen = is_frozen
        self.num_encoded = 0  # pictures that this rank has run the tower on

    def features(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        """Features of distinct pictures by hash, with gradient unless the tower is frozen (collective)."""
        if not self.is_frozen:
            return self._encoded(images)
        found = {image.sha256: self._kept.get(image.sha256) for image in images}
        with torch.no_grad():
            made = self._encoded([image for image in images if found[image.sha256] is None])
        for sha256, feature in made.items():
            # Copies: the rows of one gather share a storage that a single kept picture would hold on to.
            found[sha256] = levels = tuple(level.clone() for level in feature.levels)
            self._kept.put(sha256, levels)
        return {sha256: Features(levels) for sha256, levels in found.items() if levels is not None}

    def _encoded(self, images: Sequence[ImageRecord]) -> dict[str, Features]:
        if not images:
            return {}
        sizes = [self._num_tokens(image) for image in images]
        shares = split(sizes, self._group.size())
        own = [images[index] for index in shares[self._group.rank()]]
        self.num_encoded += len(own)
        most = max(sum(sizes[index] for index in share) for share in shares)
        parts = self._gathered(encode(self._policy, self._reader, own), most)
        features: dict[str, Features] = {}
        for share, part in zip(shares, parts, strict=True):
            rows = part.split([*(sizes[i] for i in share), most - sum(sizes[i] for i in share)])
            for index, levels in zip(share, rows[:-1], strict=True):
                features[images[index].sha256] = Features(levels.unbind(1))
        return features

    def _gathered(self, own: Sequence[Features], most: int) -> Sequence[Tensor]:
        """Every rank's features end to end, padded to `most` visual tokens, [most, levels, H] each.

        Everything after is the same on all ranks, and so is its gradient, of which each rank takes its part.
        """
        config = self._policy.model.config.vision_config
        num_levels = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
        first = next(self._policy.model.model.visual.parameters())
        padding = torch.zeros(
            most - sum(len(feature.levels[0]) for feature in own),
            num_levels,
            config.out_hidden_size,
            dtype=own[0].levels[0].dtype if own else first.dtype,
            device=first.device,
        )
        stacked = torch.cat([*(torch.stack(f.levels, dim=1) for f in own), padding])
        if not self.is_frozen and torch.is_grad_enabled() and not own:
            # So that the backward pass holds the same collectives on a rank without pictures.
            stacked.requires_grad_()
        if self._group.size() == 1:
            return [stacked]
        gathered = gather_from_sequence_parallel_region(
            stacked, tensor_parallel_output_grad=False, group=self._group
        )
        return gathered.split(most)


def split(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of pictures for each rank, so that the largest sum of sizes is small; the same on every rank.

    The largest picture first, each to the rank that has least:

        >>> split([4, 9, 4, 2], 2)
        [[1], [0, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in shares]
