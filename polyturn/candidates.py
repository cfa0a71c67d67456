"""Policies that were the best so far, by version, while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from polyturn import model
from polyturn.model import Policy


@dataclass(frozen=True)
class Candidates:
    """Writes the policy in training as a Hugging Face directory per version; a version is never written over.

    So a run that goes on from an older checkpoint still finds the policy that was the best then.
    """

    policy: Policy
    directory: Path

    def path(self, version: int) -> Path:
        """Where a version lies."""
        return self.directory / f"version_{version:06d}"

    def publish(self, version: int) -> None:
        """Write the policy as it is now."""
        model.save(self.policy, self.path(version))

    def prune(self, versions: Collection[int]) -> None:
        """Remove all but `versions`."""
        kept = {self.path(version) for version in versions}
        for path in self.directory.glob("version_*"):
            if path not in kept:
                shutil.rmtree(path)
