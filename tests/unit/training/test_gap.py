"""The gap between sampler and learner: numbers checked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from polyturn.training.gap import gap_metrics, mean_gap, turns_of
from polyturn.types import TrainingSample
from tests.unit.loop import Run, loop_params, taught_policy

PAD = 9


def sample(token_ids: list[int], mask: list[int], logprobs: list[float]) -> TrainingSample:
    return TrainingSample(
        token_ids=np.array(token_ids),
        loss_mask=np.array(mask, dtype=np.int8),
        logprobs=np.array(logprobs, dtype=np.float32),
        images=(),
    )


def test_means_by_turn_and_by_what_the_turn_answers():
    """prompt with a picture | A A | text | A | picture | A"""
    one = sample(
        [1, PAD, PAD, 5, 6, 2, 7, 2, PAD, 8],
        [0, 0, 0, 1, 1, 0, 1, 0, 0, 1],
        [0, 0, 0, -1, -1, 0, -1, 0, 0, -1],
    )
    other = sample([1, 5], [0, 1], [0, -2])  # a prompt without a picture
    own = [
        np.array([0, 0, 0, -1.1, -0.7, 0, -1.2, 0, 0, -1.8], dtype=np.float32),
        np.array([0, -2.5], dtype=np.float32),
    ]
    found = gap_metrics([one, other], own, PAD)
    assert found["train/logprob_gap/turn_1"] == pytest.approx((0.1 + 0.3 + 0.5) / 3)
    assert found["train/logprob_gap/turn_2"] == pytest.approx(0.2)
    assert found["train/logprob_gap/turn_3"] == pytest.approx(0.8)
    assert found["train/logprob_gap/image_turns"] == pytest.approx((0.1 + 0.3 + 0.8) / 3)
    assert found["train/logprob_gap/text_turns"] == pytest.approx((0.2 + 0.5) / 2)
    assert mean_gap(found) == pytest.approx((0.1 + 0.3 + 0.2 + 0.8 + 0.5) / 5)
    assert found["train/logprob_gap/share_above_ln2"] == pytest.approx(1 / 5)
    differences = [-0.1, 0.3, -0.2, -0.8, -0.5]
    k3 = sum(math.exp(d) - 1 - d for d in differences) / 5
    assert found["train/logprob_gap/k3"] == pytest.approx(k3, abs=1e-6)
    assert 0.5 < found["train/logprob_gap/p99"] <= 0.8


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)]),
        ([0, 0], []),
        ([1, 1, 0], [(1, 2)]),
        ([0, 1], [(1, 2)]),
        ([1], []),
    ],
)
def test_replies_are_the_runs_of_scored_tokens(mask: list[int], turns: list[tuple[int, int]]):
    assert turns_of(sample([1] * len(mask), mask, [0.0] * len(mask))) == turns


def test_without_trained_tokens_there_is_no_gap():
    assert gap_metrics([], [], PAD) == {}
    assert mean_gap({}) == 0.0


def test_a_run_tells_the_gap_of_each_turn(tmp_path: Path):
    """Turns of the loop's environment all show a picture; float32 on both sides."""
    run = Run(tmp_path, loop_params(), taught_policy())
    run.train()
    for metrics in run.recorder.history[:4]:
        assert metrics["train/logprob_gap/mean"] == metrics["train/train_rollout_logprob_abs_diff"]
        assert metrics["train/logprob_gap/turn_1"] < 1e-4
        assert metrics["train/logprob_gap/image_turns"] < 1e-4
        assert "train/logprob_gap/text_turns" not in metrics
