"""Metrics of what happened inside trajectories: turns, calls, tokens by role, rewards by turns, repetition."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from polyturn.env_metrics import env_failure_metrics
from polyturn.envs.tools import ToolCallError, parse_tool_calls
from polyturn.types import Status, Trajectory

REPETITION_WINDOW = 10_000  # characters at a trajectory's end that are looked at, as slime does
REPETITION_RATIO = 10  # size / compressed size from which a text counts as repetitive


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means and extremes over trajectories; lengths are in tokens.

    slime's names: multi_turn/raw_response_length counts everything after the prompt, wo_obs_response_length what
    was sampled. multi_turn/reward_by_turns/N is the mean reward of the rewarded trajectories of N turns.
    """
    return {
        "multi_turn/turns/mean": _mean([len(t.turns) for t in trajectories]),
        "multi_turn/turns/max": _max([len(t.turns) for t in trajectories]),
        **_calls(trajectories),
        "multi_turn/images/mean": _mean([len(t.images) for t in trajectories]),
        "multi_turn/images/max": _max([len(t.images) for t in trajectories]),
        **_spread("multi_turn/raw_response_length", [_response_length(t) for t in trajectories]),
        **_spread("multi_turn/wo_obs_response_length", [t.num_sampled for t in trajectories]),
        "rollout/tokens/prompt": _mean([t.tokens.prompt for t in trajectories]),
        "rollout/tokens/assistant": _mean([t.tokens.assistant for t in trajectories]),
        "rollout/tokens/observation": _mean([t.tokens.observation for t in trajectories]),
        "rollout/tokens/image_pads": _mean([t.tokens.image_pads for t in trajectories]),
        "rollout/repetition_frac": _mean([is_repetitive(t) for t in trajectories]),
        **_comparisons(trajectories),
        **_reward_by_turns(trajectories),
        **env_failure_metrics(trajectories),
    }


def env_times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Seconds that each trajectory spent in its environment; no part of a run's history, as all times."""
    seconds = [t.env_time_s for t in trajectories]
    return {
        "perf/env_time/mean": _mean(seconds),
        "perf/env_time/max": _max(seconds),
        "perf/env_time/sum": float(sum(seconds)),
    }


def is_repetitive(trajectory: Trajectory) -> bool:
    """Whether the end of what the policy said compresses (zlib) to less than a tenth."""
    said = "".join(turn.reply_text for turn in trajectory.turns)[-REPETITION_WINDOW:].encode()
    return bool(said) and len(said) > REPETITION_RATIO * len(zlib.compress(said, 9))


def _calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Tool calls and those that could not be read; a reply that was cut by a limit has no parse error."""
    num_calls: list[int] = []
    num_errors: list[int] = []
    for trajectory in trajectories:
        parsed = [parse_tool_calls(turn.reply_text) for turn in trajectory.turns]
        if parsed and trajectory.status is Status.TRUNCATED:
            parsed[-1] = [call for call in parsed[-1] if not isinstance(call, ToolCallError)]
        calls = [call for of_turn in parsed for call in of_turn]
        num_calls.append(len(calls))
        num_errors.append(sum(isinstance(call, ToolCallError) for call in calls))
    return {
        "multi_turn/tool_calls/mean": _mean(num_calls),
        "multi_turn/parse_errors/mean": _mean(num_errors),
    }


def _comparisons(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewritten = [t.num_rewritten for t in trajectories if t.num_rewritten is not None]
    return {
        "rollout/compared/count": float(len(rewritten)),
        "rollout/compared/rewritten": float(sum(rewritten)),
    }


def _reward_by_turns(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(len(trajectory.turns), []).append(trajectory.reward)
    return {
        f"multi_turn/reward_by_turns/{number}": _mean(rewards[number]) for number in sorted(rewards)
    }


def _response_length(trajectory: Trajectory) -> int:
    trained = np.flatnonzero(trajectory.loss_mask)
    return len(trajectory.loss_mask) - int(trained[0]) if len(trained) else 0


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min, slime's four."""
    return {
        f"{name}/mean": _mean(values),
        f"{name}/median": float(np.median(values)) if values else 0.0,
        f"{name}/max": _max(values),
        f"{name}/min": float(min(values, default=0)),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _max(values: Sequence[float]) -> float:
    return float(max(values, default=0))
