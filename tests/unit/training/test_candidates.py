"""polyturn.training.candidates: a version is found as it was published."""

from __future__ import annotations

from pathlib import Path

from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.training.candidates import Candidates
from polyturn.world import World
from tests.unit import tiny


def test_only_the_versions_that_checkpoints_name_are_kept(policy: Policy, tmp_path: Path) -> None:
    own = tiny.copy_of(policy)
    candidates = Candidates(own, tmp_path)
    candidates.publish(0, own.model.named_parameters())
    first = model.weights_digest(own.model)
    next(own.model.parameters()).data.add_(1.0)
    candidates.publish(3, own.model.named_parameters())
    candidates.publish(5, own.model.named_parameters())
    candidates.prune({0, 5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000000", "version_000005"]
    kept = model.load(tiny.params().model, candidates.path(0))
    assert model.weights_digest(kept.model) == first


def test_other_ranks_take_the_weights_and_write_nothing(policy: Policy, tmp_path: Path) -> None:
    """Each tensor of a sharded learner is gathered by all ranks: none may leave the others waiting."""
    weights = iter(policy.model.named_parameters())
    Candidates(policy, tmp_path, World(1, 2)).publish(0, weights)
    assert next(weights, None) is None
    assert list(tmp_path.iterdir()) == []
