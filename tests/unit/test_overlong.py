"""DAPO's soft punishment of long trajectories, by the paper's formula, as a function and as a reward term."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from polyturn.overlong import overlong_penalty
from polyturn.params import RewardParams
from polyturn.reward import score
from tests.unit.evaluation.test_evaluate import trajectory


def test_the_papers_lengths() -> None:
    """L_max 20480, L_cache 4096 (arXiv:2503.14476, section 4.1): free up to 16384."""
    found = [
        overlong_penalty(n, max_tokens=20480, buffer_tokens=4096)
        for n in (0, 16384, 16385, 18432, 20480, 99999)
    ]
    assert found == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    assert str(found[0]) == "0.0"


@pytest.mark.parametrize(("maximum", "buffer"), [(10, 10), (10, 1), (7, 3)])
def test_it_falls_steadily_from_0_to_minus_1(maximum: int, buffer: int) -> None:
    values = [
        overlong_penalty(n, max_tokens=maximum, buffer_tokens=buffer) for n in range(maximum + 3)
    ]
    assert values[0] == 0.0
    assert values[maximum - buffer] == 0.0
    assert values[maximum:] == [-1.0] * 3
    steps = [other - one for one, other in itertools.pairwise(values)]
    inside = steps[maximum - buffer : maximum]
    assert inside == pytest.approx([-1 / buffer] * buffer)


@pytest.mark.parametrize(("tokens", "total"), [(4, 1.0), (6, 0.5), (8, 0.0), (20, 0.0)])
def test_as_a_term_it_counts_sampled_tokens_of_all_turns(tokens: int, total: float) -> None:
    """Reward 1 less the factor 1 times the penalty; prompt and observations are free."""
    params = RewardParams.model_validate(
        {
            "terms": [
                {"term": "tests.unit.test_overlong:one"},
                {"term": "polyturn.reward:soft_overlong_punishment", "weight": 1.0},
            ],
            "overlong": {"max_tokens": 8, "buffer_tokens": 4},
        }
    )
    mask = np.array([0] * 30 + [1] * tokens, dtype=np.int8)
    long = replace(
        trajectory(1.0),
        token_ids=np.zeros(len(mask), np.int64),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
    )
    reward = score(long, long.problem, params)
    assert (reward.total, reward.failures) == (total, ())
    assert reward.terms["soft_overlong_punishment"] == pytest.approx(total - 1)


def one(trajectory: object, problem: object) -> float:
    """Every trajectory is right."""
    del trajectory, problem
    return 1.0
