"""A rank's share of the samples of an update, in packed micro-batches that are balanced over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyturn.balance import partition
from polyturn.batching import collate, loads
from polyturn.learner.base import Logprobs
from polyturn.params import LearnerParams
from polyturn.policy.model import Policy
from polyturn.policy.transfer import to_device
from polyturn.policy.vision import patch_cost
from polyturn.render import Renderer
from polyturn.types import Batch, TrainingSample
from polyturn.world import World


@dataclass(frozen=True)
class Share:
    """This rank's part of a micro-batch: which of the samples (maybe none), and their batch.

    `with_tower`: some sample of the update has a picture, so that the vision tower runs on every rank. `has_more`:
    another micro-batch of the same samples follows.
    """

    indices: Sequence[int]
    batch: Batch
    with_tower: bool
    has_more: bool


@dataclass(frozen=True)
class Splitter:
    """Splits samples over the ranks of `world`, the same way on each; costs are in tokens."""

    renderer: Renderer
    world: World
    device: torch.device
    max_tokens: int
    patch_cost: float

    @classmethod
    def of(
        cls,
        policy: Policy,
        renderer: Renderer,
        params: LearnerParams,
        *,
        world: World,
        device: torch.device,
    ) -> Splitter:
        """That of a learner which trains `policy`, whose weights are whole yet."""
        cost = 0.0 if params.is_tower_frozen else patch_cost(policy)
        return cls(renderer, world, device, params.micro_batch_tokens, cost)

    def shares(
        self, samples: Sequence[TrainingSample], weights: Sequence[float]
    ) -> Iterator[Share]:
        """This rank's micro-batches; every rank has the same number of them, some of which may hold no sample."""
        ranks = partition(
            loads(samples, self.renderer),
            num_ranks=self.world.size,
            max_tokens=self.max_tokens,
            patch_cost=self.patch_cost,
        )
        with_tower = has_pictures(samples)
        mine = ranks[self.world.rank]
        for number, indices in enumerate(mine, start=1):
            batch = collate(
                [samples[index] for index in indices],
                [weights[index] for index in indices],
                self.renderer,
            )
            yield Share(indices, batch.to(self.device), with_tower, number < len(mine))

    def gathered(
        self, samples: Sequence[TrainingSample], values: Sequence[Logprobs], indices: Sequence[int]
    ) -> Tensor:
        """The values of a micro-batch's trained tokens in reading order, [N]."""
        chosen = [values[index][is_scored(samples[index])] for index in indices]
        joined = np.concatenate([np.zeros(0, dtype=np.float32), *chosen])
        return to_device(torch.from_numpy(joined), self.device)


def spread(
    values: npt.NDArray[np.float32], samples: Sequence[TrainingSample], indices: Sequence[int]
) -> dict[int, Logprobs]:
    """Undo `Splitter.gathered`: each sample's values [T] by its index, 0 where nothing is trained."""
    found: dict[int, Logprobs] = {}
    for index in indices:
        is_trained = is_scored(samples[index])
        number = int(is_trained.sum())
        found[index] = np.zeros(len(is_trained), dtype=np.float32)
        found[index][is_trained] = values[:number]
        values = values[number:]
    return found


def mean_gap(own: Sequence[Logprobs], samples: Sequence[TrainingSample]) -> float:
    """Mean |own - sampler's| logprob over the trained tokens of all samples, 0 if there are none."""
    gaps = [
        np.abs(mine - sample.logprobs)[is_scored(sample)]
        for mine, sample in zip(own, samples, strict=True)
    ]
    joined = np.concatenate([np.zeros(0), *gaps])
    return float(joined.mean()) if len(joined) else 0.0


def has_pictures(samples: Sequence[TrainingSample]) -> bool:
    """Whether the vision tower runs at all, on any rank.

    Where it does not its weights have no gradient, rather than a zero one that would still move them (by their moments
    and their decay).
    """
    return any(sample.images for sample in samples)


def is_scored(sample: TrainingSample) -> npt.NDArray[np.bool_]:
    """Which tokens are trained, [T]: those of the mask but the first, before which nothing stands."""
    mask = sample.loss_mask == 1
    mask[:1] = False
    return mask
