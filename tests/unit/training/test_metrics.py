"""Metrics of a step, counted by hand, under the names that dashboards know."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from polyturn.learner.base import UpdateStats
from polyturn.training.metrics import CURVE_COLUMNS, curve_csv, rollout_metrics, update_metrics
from polyturn.types import Group, StopReason, Trajectory, Turn
from tests.unit.evaluation.test_evaluate import trajectory

CALL = '<tool_call>{"name": "zoom", "arguments": {"region": "northwest"}}</tool_call>'
UPDATE = UpdateStats(
    grad_norm=2.0,
    lr=1e-3,
    num_tokens=10,
    loss_metrics={
        "loss": 0.5,
        "pg_clipfrac": 0.1,
        "entropy": 1.5,
        "train_rollout_logprob_abs_diff": 1e-6,
        "train_rollout_logprob_abs_diff_max": 1e-5,
        "ratio_error_max": 0.0,
        "tis_max": 1.5,
    },
)


def saying(base: Trajectory, *texts: str) -> Trajectory:
    return replace(base, turns=tuple(Turn((1, 2), (-1.0, -1.0), text, None) for text in texts))


def groups() -> list[Group]:
    return [
        Group(
            0,
            (
                saying(trajectory(1.0, 2), CALL, "12"),
                saying(trajectory(0.0, 3), CALL + CALL, "<tool_call>{", "13"),
            ),
        ),
        Group(
            1,
            (
                trajectory(0.0, stop=StopReason.MAX_NEW_TOKENS),
                trajectory(None, stop=StopReason.ENV_TIMEOUT),
            ),
        ),
    ]


def test_rollout_metrics_by_hand() -> None:
    metrics = rollout_metrics(groups(), seed=0)
    expected = {
        "rollout/raw_reward": 1 / 3,
        "rollout/response_len/mean": (4 + 6 + 2 + 2) / 4,
        "rollout/response_len/max": 6,
        "rollout/total_len/mean": (5 + 7 + 3 + 3) / 4,
        "rollout/zero_std/count": 1,
        "rollout/fully_masked/count": 0,
        "rollout/truncated_ratio": 0.25,
        "rollout/failed_ratio": 0.25,
        "multi_turn/turns/mean": 7 / 4,
        "multi_turn/turns/max": 3,
        "multi_turn/tool_calls/mean": 4 / 4,
        "multi_turn/parse_errors/mean": 1 / 4,
        "multi_turn/images/mean": 7 / 4,
        "rollout/stop/env_done": 0.5,
        "rollout/stop/max_new_tokens": 0.25,
        "rollout/stop/env_timeout": 0.25,
        "rollout/stop/max_turns": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert sum(value for name, value in metrics.items() if "/stop/" in name) == 1.0
    assert metrics["rollout/raw_reward_low"] < 0.25 < metrics["rollout/raw_reward_high"]
    assert rollout_metrics(groups(), seed=0) == metrics


def test_tok_15_trajectories_without_a_trained_token_are_counted() -> None:
    """They train nothing and leave an update's denominators, which must not go unseen (NeMo-RL #158)."""
    one = trajectory(1.0)
    masked = replace(one, loss_mask=np.zeros_like(one.loss_mask))
    for number in range(3):
        group = Group(0, (masked,) * number + (one,) * (2 - number))
        assert rollout_metrics([group], seed=0)["rollout/fully_masked/count"] == number


def test_rewards_outside_of_0_and_1_are_fine() -> None:
    wild = [Group(0, (trajectory(-2.0), trajectory(3.0))), Group(1, (trajectory(4.0),))]
    metrics = rollout_metrics(wild, seed=0)
    assert metrics["rollout/raw_reward"] == pytest.approx(5 / 3)
    assert metrics["rollout/raw_reward_low"] <= metrics["rollout/raw_reward_high"]


def test_a_rollout_without_any_reward_still_has_metrics() -> None:
    failed = [Group(0, (trajectory(None, stop=StopReason.ENV_ERROR),) * 2)]
    metrics = rollout_metrics(failed, seed=0)
    assert metrics["rollout/raw_reward"] == 0.0
    assert metrics["rollout/failed_ratio"] == 1.0


def test_update_metrics_are_means_beside_the_measured_gap() -> None:
    changed = {
        **UPDATE.loss_metrics,
        "loss": 0.7,
        "pg_clipfrac": 0.3,
        "train_rollout_logprob_abs_diff": 0.3,
        "train_rollout_logprob_abs_diff_max": 0.9,
        "ratio_error_max": 0.4,
        "tis_max": 2.5,
    }
    second = replace(UPDATE, num_tokens=20, loss_metrics=changed)
    metrics = update_metrics([UPDATE, second], gap=0.25)
    assert metrics["train/loss"] == pytest.approx(0.6)
    assert metrics["train/pg_clipfrac"] == pytest.approx(0.2)
    assert metrics["train/num_tokens"] == 30
    assert metrics["train/num_updates"] == 2
    assert metrics["train/train_rollout_logprob_abs_diff"] == 0.25
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == 1e-5  # of the first update
    assert metrics["train/first_ratio_error"] == 0.0
    assert (metrics["train/ratio_error_max"], metrics["train/tis_max"]) == (0.4, 2.5)
    assert update_metrics([], gap=0.25) == {
        "train/num_updates": 0.0,
        "train/train_rollout_logprob_abs_diff": 0.25,
    }


def test_curve_has_a_row_per_step_and_gaps_where_a_metric_is_missing() -> None:
    history = [
        {
            **rollout_metrics(groups(), seed=0),
            **update_metrics([UPDATE], gap=0.25),
            "eval/accuracy": 0.1 + 0.2,
        },
        update_metrics([], gap=0.25),
    ]
    rows = list(csv.DictReader(io.StringIO(curve_csv(history))))
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[0]["eval_accuracy"]) == 0.1 + 0.2
    assert set(rows[0]) == {"step", *CURVE_COLUMNS}
    known = {"step", "logprob_gap_mean"}
    assert {name for name, value in rows[1].items() if value} == known
