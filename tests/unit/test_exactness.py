"""What is trained on is what was sampled: whole rollouts with a real sampler, scored again by the learner's code."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.batching import collate
from polyturn.learner.scoring import score_batch
from polyturn.params import EnvParams, RolloutParams
from polyturn.policy import vision
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.sampler.hf import HfSampler
from polyturn.samples import from_trajectory
from polyturn.training.metrics import trajectories_of
from polyturn.types import Trajectory
from tests.unit import tiny
from tests.unit.sampler.test_hf import steered

SETTINGS = RolloutSettings(
    EnvParams(build="tests.unit.toy_envs:build_shower", tools_in_prompt=False),
    RolloutParams(max_turns=3, max_turn_tokens=10, compare_fraction=1.0),
    tiny.params().reward,
)


@pytest.fixture(scope="module", params=["policy", "policy_2_5"])
def talker(request: pytest.FixtureRequest) -> Policy:
    """A policy that ends its turns; its environment shows a new picture after each of the first two."""
    policy: Policy = request.getfixturevalue(request.param)
    return steered(policy, policy.family.end_of_turn_id, 6.0)


def played(policy: Policy, seed: int, temperature: float) -> list[Trajectory]:
    renderer = Renderer(policy)
    groups = asyncio.run(
        rollout(
            tiny.problems(2),
            HfSampler(policy, renderer),
            renderer,
            SETTINGS,
            Draw(seed, 3, temperature),
        )
    )
    return trajectories_of(groups)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.6, 1.0, 1.4]))
def test_teacher_forced_logprobs_equal_the_samplers(
    talker: Policy, seed: int, temperature: float
) -> None:
    """Three turns, pictures in the prompt and after turns 1 and 2, rows that end early among rows that go on."""
    renderer = Renderer(talker)
    trajectories = played(talker, seed, temperature)
    samples = [from_trajectory(trajectory, 1.0) for trajectory in trajectories]
    batch = collate(samples, [1.0] * len(samples), renderer)
    encoded = vision.encode(talker, vision.PatchReader(talker), batch.images)
    features = {image.sha256: made for image, made in zip(batch.images, encoded, strict=True)}
    with torch.no_grad():
        scored = score_batch(talker, batch, features, temperature).logprobs.numpy()
    sampled = np.concatenate([sample.logprobs[sample.loss_mask == 1] for sample in samples])
    assert np.abs(scored - sampled).max() < 1e-4
    pad = talker.family.image_token_id
    for trajectory in trajectories:
        ids = [token for turn in trajectory.turns for token in turn.reply_ids]
        assert trajectory.token_ids[trajectory.loss_mask == 1].tolist() == ids
        cells = sum(rows * columns for rows, columns in map(renderer.grid, trajectory.images))
        assert int((trajectory.token_ids == pad).sum()) == cells
        assert trajectory.num_rewritten is not None  # compared with the rendered conversation


def test_most_trajectories_of_that_test_have_three_turns_and_three_pictures(talker: Policy) -> None:
    shapes = [(len(t.turns), len(t.images)) for t in played(talker, 0, 1.0)]
    assert shapes.count((3, 3)) >= 3


def test_seeds_give_the_same_rollout_again_and_other_seeds_another(talker: Policy) -> None:
    one, again, other = (played(talker, seed, 1.0) for seed in (0, 0, 1))
    for first, second in zip(one, again, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tolist() == second.logprobs.tolist()
    assert [t.token_ids.tolist() for t in one] != [t.token_ids.tolist() for t in other]
