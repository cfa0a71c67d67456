"""Policies that were the best so far, by version, while a run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from polyturn import directories
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.world import ONE, World


def version_path(directory: Path, version: int) -> Path:
    """Where a version lies below the candidates' directory."""
    return directory / f"version_{version:06d}"


@dataclass(frozen=True)
class Candidates:
    """Writes the policy in training as a Hugging Face directory per version; a version is never written over.

    So a run that goes on from an older checkpoint still finds the policy that was the best then. `policy` gives
    config and processor; `dtype` None leaves tensors as they are.
    """

    policy: Policy
    directory: Path
    world: World = ONE
    dtype: torch.dtype | None = None

    def path(self, version: int) -> Path:
        """Where a version lies."""
        return version_path(self.directory, version)

    def publish(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the policy with `weights`, whole and under Hugging Face names (collective: all ranks take them all).

        Raises:
            OSError: the directory cannot be written.
            ModelError: weights are missing or unknown.
        """
        if self.world.is_main:
            model.save(self.policy, self.path(version), weights=weights, dtype=self.dtype)
        else:
            deque(weights, maxlen=0)

    def prune(self, versions: Collection[int]) -> None:
        """Remove all but `versions`."""
        kept = {self.path(version) for version in versions}
        for path in self.directory.glob("version_*"):
            if path not in kept:
                directories.remove(path)
