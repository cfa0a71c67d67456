"""polyturn.candidates: a version is found as it was published."""

from __future__ import annotations

from pathlib import Path

from polyturn import model
from polyturn.candidates import Candidates
from polyturn.model import Policy
from tests.unit import tiny


def test_only_the_versions_that_checkpoints_name_are_kept(policy: Policy, tmp_path: Path) -> None:
    own = tiny.copy_of(policy)
    candidates = Candidates(own, tmp_path)
    candidates.publish(0)
    first = model.weights_digest(own.model)
    next(own.model.parameters()).data.add_(1.0)
    candidates.publish(3)
    candidates.publish(5)
    candidates.prune({0, 5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000000", "version_000005"]
    kept = model.load(tiny.params().model, candidates.path(0))
    assert model.weights_digest(kept.model) == first
