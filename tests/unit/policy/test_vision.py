"""The vision tower in training: pictures encoded once, ranks in step whatever they have to look at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from polyturn.batching import collate
from polyturn.learner.scoring import score_batch
from polyturn.policy import vision
from polyturn.policy.model import Policy
from polyturn.policy.vision import TowerInTraining, blank_picture, patch_cost
from polyturn.render import Renderer
from polyturn.types import ImageRecord
from tests.unit import tiny

PICTURES = (tiny.picture(), tiny.picture(64, 32, 90), tiny.picture(32, 48, 30))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> list[int]:
    """Pictures of each call of the tower (by the rows of its grid)."""
    made: list[int] = []
    forward = policy.model.model.get_image_features

    def counting(patches: torch.Tensor, **named: torch.Tensor) -> object:
        made.append(len(named["image_grid_thw"]))
        return forward(patches, **named)

    monkeypatch.setattr(policy.model.model, "get_image_features", counting)
    return made


@pytest.mark.parametrize("images", [PICTURES, PICTURES[:1], ()])
def test_a_collective_tower_runs_once_whatever_the_pictures(
    policy: Policy, calls: list[int], images: Sequence[ImageRecord]
) -> None:
    own = tiny.copy_of(policy)
    own.model.model.get_image_features = policy.model.model.get_image_features
    tower = TowerInTraining(own, is_collective=True)
    for _ in range(2):
        features = tower.features(images)
        assert {image.sha256 for image in images} <= features.keys()
    assert len(calls) == 2


@pytest.mark.parametrize("images", [PICTURES, ()])
def test_a_tower_of_ones_own_runs_for_new_pictures_only(
    policy: Policy, calls: list[int], images: Sequence[ImageRecord]
) -> None:
    tower = TowerInTraining(policy)
    tower.freeze(True)
    try:
        tower.features(images)
        tower.features(images)
    finally:
        tower.freeze(False)
    assert calls == ([len(images)] if images else [])


def test_a_rank_without_pictures_has_zero_gradients_for_the_tower(policy: Policy) -> None:
    """So that every rank reduces the same parameters; the text's gradients are those without the blank picture."""
    found: list[dict[str, torch.Tensor]] = []
    for is_collective in (False, True):
        own = tiny.copy_of(policy)
        renderer = Renderer(own)
        batch = collate([tiny.training_sample(renderer, 5)], [1.0], renderer)
        features = TowerInTraining(own, is_collective=is_collective).features(batch.images)
        score_batch(own, batch, features, 1.0).logprobs.sum().backward()
        found.append({n: p.grad for n, p in own.model.named_parameters() if p.grad is not None})
    text, everything = found
    assert not any("visual" in name for name in text)
    towers = {name: value for name, value in everything.items() if "visual" in name}
    assert towers.keys() == {n for n, _ in policy.model.named_parameters() if "visual" in n}
    assert not any(value.any() for value in towers.values())
    assert all(torch.equal(value, everything[name]) for name, value in text.items())


def test_an_idle_rank_has_zero_gradients_for_all_parameters(policy: Policy) -> None:
    own = tiny.copy_of(policy)
    batch = collate([], [], Renderer(own))
    features = TowerInTraining(own, is_collective=True).features(batch.images)
    scores = score_batch(own, batch, features, 1.0)
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    scores.logprobs.sum().backward()
    gradients = [parameter.grad for parameter in own.model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_the_blank_picture_is_one_visual_token(policy: Policy) -> None:
    (features,) = vision.encode(policy, vision.PatchReader(policy), [blank_picture(policy.family)])
    assert len(features.levels[0]) == 1


def test_a_patch_costs_the_towers_share_of_weights_and_nothing_when_frozen(policy: Policy) -> None:
    blocks = sum(p.numel() for p in policy.model.model.visual.blocks.parameters())
    layers = sum(p.numel() for p in policy.model.model.language_model.layers.parameters())
    tower = TowerInTraining(policy)
    assert tower.patch_cost == patch_cost(policy) == blocks / layers
    tower.freeze(True)
    assert tower.patch_cost == 0
    tower.freeze(False)
