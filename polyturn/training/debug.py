"""What the debug switches of the loop need: a sampler that samples nothing, and a step's batch as a file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.data.files import atomic_path
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.training.run_state import Best
from polyturn.types import Json, TrainingSample

if TYPE_CHECKING:
    import torch


class NoSampler:
    """Takes the sampler's place where nothing is sampled (train.debug.mode: train_only)."""

    @property
    def is_lockstep(self) -> bool:
        """Nothing is sampled, in any order."""
        return True

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"mode train_only samples nothing, but {len(requests)} replies are wanted"
        )

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Ignore new weights."""

    def rest(self) -> None:
        """Nothing to give back."""

    def take_metrics(self) -> Mapping[str, float]:
        """Nothing was sampled."""
        return {}

    def close(self) -> None:
        """Hold nothing."""


def unscored(version: int) -> Best:
    """The policy of a run that scores none: a later one replaces it."""
    return Best(version, accuracy=0.0, accuracy_low=-1.0)


def sample_entry(sample: TrainingSample) -> dict[str, Json]:
    """What the learner is given of one trajectory, as JSON; floats read back to the same bits."""
    return {
        "id": sample.id,
        "advantage": sample.advantage,
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "logprobs": [float(value) for value in sample.logprobs],
        "images": [image.sha256 for image in sample.images],
    }


def write_batch(directory: Path, step: int, updates: Sequence[Sequence[TrainingSample]]) -> Path:
    """Write a step's samples, one per line with the number of its update, in the order that the learner gets them."""
    path = directory / f"batch_step_{step:06d}.jsonl.gz"
    lines = [
        json.dumps({"update": number, **sample_entry(sample)})
        for number, samples in enumerate(updates)
        for sample in samples
    ]
    with atomic_path(path) as partial:
        partial.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    return path
