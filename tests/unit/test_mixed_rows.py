"""Problems with and without pictures in one dataset (case ROW-06): sampled, graded and trained on together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest

from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import EnvParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.sampler.hf import HfSampler
from polyturn.samples import from_trajectory
from polyturn.types import Group, Message, Problem
from tests.unit import tiny

WORDS = tuple(
    Problem(f"words-{i}", "train", (Message("user", (f"What is {i} plus 2?",)),), str(i + 2))
    for i in range(2)
)
FIGURES = tiny.problems(2)
PARAMS = tiny.params(rollout={"max_turns": 1, "max_new_tokens": 12, "max_turn_tokens": 12})


def sampled(policy: Policy, problems: Sequence[Problem]) -> dict[str, Group]:
    """Two tries at each problem by the real sampler."""
    renderer = Renderer(policy)
    sampler = HfSampler(policy, renderer, is_vision_frozen=True)
    env = EnvParams(build="polyturn.envs.single_turn:build_env", tools_in_prompt=False)
    settings = RolloutSettings(env, PARAMS.rollout, PARAMS.reward)
    groups = asyncio.run(rollout(problems, sampler, renderer, settings, Draw(3, 2, 1.0)))
    return {group.trajectories[0].problem.id: group for group in groups}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_batch_of_both_kinds_gives_what_each_kind_gives_alone(
    policy: Policy, order: tuple[int, ...]
) -> None:
    both = (*WORDS, *FIGURES)
    together = sampled(policy, [both[index] for index in order])
    for kind in (WORDS, FIGURES):
        for name, group in sampled(policy, kind).items():
            for mine, other in zip(together[name].trajectories, group.trajectories, strict=True):
                assert mine.token_ids.tolist() == other.token_ids.tolist()
                assert np.abs(mine.logprobs - other.logprobs).max() < 1e-5


def test_one_training_step_over_both_kinds_is_finite_and_agrees_with_the_sampler(
    policy: Policy,
) -> None:
    policy = tiny.copy_of(policy)
    groups = sampled(policy, (WORDS[0], FIGURES[0], WORDS[1], FIGURES[1]))
    samples = [
        from_trajectory(trajectory, advantage)
        for group in groups.values()
        for trajectory, advantage in zip(group.trajectories, (1.0, -1.0), strict=True)
    ]
    assert sorted(len(sample.images) for sample in samples) == [0, 0, 0, 0, 1, 1, 1, 1]
    learner = FsdpLearner(
        policy, Renderer(policy), PARAMS.learner, PARAMS.loss, PARAMS.rollout.temperature
    )
    assert learner.logprob_gap(samples) < 1e-5
    alone = [learner.logprobs([sample])[0] for sample in samples]
    for together, own in zip(learner.logprobs(samples), alone, strict=True):
        assert np.abs(together - own).max() < 1e-5
    stats = learner.update(samples, lr_scale=1.0, is_on_policy=True)
    assert math.isfinite(stats.grad_norm)
    assert stats.grad_norm > 0
    assert all(math.isfinite(value) for value in stats.loss_metrics.values())
    assert stats.num_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
