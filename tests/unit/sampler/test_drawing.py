"""Inverse transform sampling over blocks equals sampling over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.sampler.drawing import BLOCK, draw_tokens


def one(probabilities: list[float], uniform: float) -> int:
    distribution = torch.tensor([probabilities]).log()
    return int(draw_tokens(distribution, torch.tensor([uniform], dtype=torch.float64)))


def test_worked_example() -> None:
    assert [one([0.2, 0.0, 0.8], u) for u in (0.0, 0.1, 0.21, 0.99, 1 - 2**-53)] == [0, 0, 2, 2, 2]
    assert [one([0.0, 1.0, 0.0], u) for u in (0.0, 0.5, 1 - 2**-53)] == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]),
    uniform=st.lists(
        st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), min_size=1, max_size=4
    ),
    share=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_it_is_the_first_token_whose_sum_is_above_the_number(
    seed: int, vocabulary: int, uniform: list[float], share: float
) -> None:
    """Against an exact running sum; a token of probability 0 is never drawn, whatever is banned."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 4, (len(uniform), vocabulary)).astype(np.float32))
    logits[:, rng.random(vocabulary) < share] = -torch.inf
    logits[:, rng.integers(vocabulary)] = 1.0
    distribution = logits.log_softmax(-1)
    drawn = draw_tokens(distribution, torch.tensor(uniform, dtype=torch.float64))
    for row, token in enumerate(drawn.tolist()):
        exact = distribution[row].double().exp().numpy().astype(np.longdouble)
        sums = np.cumsum(exact)
        assert exact[token] > 0
        target = uniform[row] * sums[-1]
        assert sums[token] >= target * (1 - 1e-12)
        assert token == 0 or sums[token - 1] <= target * (1 + 1e-12) + 1e-15
