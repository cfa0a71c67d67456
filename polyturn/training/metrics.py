"""Metrics of a training step, under slime's names where slime has them; those of turns are in turn_metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from polyturn.advantage import are_equal
from polyturn.evaluation.statistics import bootstrap_interval
from polyturn.learner.base import UpdateStats
from polyturn.training.turn_metrics import turn_metrics
from polyturn.types import Group, Status, StopReason, Trajectory

Metrics = dict[str, float]


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories in (group, sibling) order."""
    return list(chain.from_iterable(group.trajectories for group in groups))


def rollout_metrics(groups: Sequence[Group], *, seed: int) -> Metrics:
    """What a rollout batch was like; `seed` is for the bootstrap band of the reward over groups."""
    trajectories = trajectories_of(groups)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    by_group = [[t.reward for t in group.trajectories if t.reward is not None] for group in groups]
    group_means = [float(np.mean(values)) for values in by_group if values]
    bounds = (min([0.0, *group_means]), max([1.0, *group_means]))
    band = bootstrap_interval(group_means, 500, seed, bounds=bounds) if group_means else None
    lengths = [t.num_sampled for t in trajectories]
    count = max(1, len(trajectories))
    metrics = {
        "rollout/raw_reward": float(np.mean(rewards)) if rewards else 0.0,
        "rollout/raw_reward_low": band.low if band else 0.0,
        "rollout/raw_reward_high": band.high if band else 0.0,
        "rollout/response_len/mean": float(np.mean(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/total_len/mean": float(np.mean([len(t.token_ids) for t in trajectories])),
        "rollout/zero_std/count": float(sum(are_equal(values) for values in by_group)),
        "rollout/fully_masked/count": float(sum(length == 0 for length in lengths)),
        "rollout/truncated_ratio": sum(t.status is Status.TRUNCATED for t in trajectories) / count,
        "rollout/failed_ratio": sum(not t.status.is_rewarded for t in trajectories) / count,
        "rollout/grader_failures": sum(bool(t.reward_failures) for t in trajectories) / count,
        **turn_metrics(trajectories),
    }
    for reason in StopReason:
        metrics[f"rollout/stop/{reason}"] = (
            sum(t.stop_reason is reason for t in trajectories) / count
        )
    return metrics


def update_metrics(updates: Sequence[UpdateStats], *, gap: float) -> Metrics:
    """Means (of *_max: maxima) over a rollout's updates; `gap` is the sampler/learner logprob gap measured before the first."""
    always = {
        "train/num_updates": float(len(updates)),
        "train/train_rollout_logprob_abs_diff": gap,
    }
    if not updates:
        return always

    first = updates[0]
    of_loss: Metrics = {}
    for name in first.loss_metrics:
        join = max if name.endswith("_max") else np.mean
        of_loss[f"train/{name}"] = float(join([update.loss_metrics[name] for update in updates]))
    return of_loss | {
        "train/grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "train/lr": first.lr,
        "train/num_tokens": float(sum(update.num_tokens for update in updates)),
        "train/train_rollout_logprob_abs_diff_max": first.loss_metrics[
            "train_rollout_logprob_abs_diff_max"
        ],
        "train/first_ratio_error": first.loss_metrics["ratio_error_max"],
        **always,
    }


CURVE_COLUMNS: Mapping[str, str] = {
    "reward_mean": "rollout/raw_reward",
    "reward_low": "rollout/raw_reward_low",
    "reward_high": "rollout/raw_reward_high",
    "turns_mean": "multi_turn/turns/mean",
    "tool_calls_mean": "multi_turn/tool_calls/mean",
    "response_len_mean": "rollout/response_len/mean",
    "truncated_fraction": "rollout/truncated_ratio",
    "zero_variance_groups": "rollout/zero_std/count",
    "entropy": "train/entropy",
    "clip_fraction": "train/pg_clipfrac",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "logprob_gap_mean": "train/train_rollout_logprob_abs_diff",
    "logprob_gap_max": "train/train_rollout_logprob_abs_diff_max",
    "eval_accuracy": "eval/accuracy",
    "eval_accuracy_low": "eval/accuracy_low",
    "eval_accuracy_high": "eval/accuracy_high",
}


def curve_csv(history: Sequence[Mapping[str, float]]) -> str:
    """The training curve as CSV, one row per step; empty where a step has no such metric."""
    lines = [",".join(["step", *CURVE_COLUMNS])]
    for step, metrics in enumerate(history):
        values = [repr(metrics[name]) if name in metrics else "" for name in CURVE_COLUMNS.values()]
        lines.append(",".join([str(step), *values]))
    return "\n".join(lines) + "\n"
