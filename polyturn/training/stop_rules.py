"""Rules that end training early; each is a pure function of the history, one mapping of metrics per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.params.train import StopParams

History = Sequence[Mapping[str, float]]
GAP = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True)
class Stopped:
    """Training ended before train.steps: after `step` rollout batches, and why."""

    step: int
    reason: str


def plateau(history: History, params: StopParams) -> str | None:
    """Validation stands still: plateau_evals scores in a row, none better than the best by plateau_min_gain.

    A score is the lower bound of the accuracy's interval, by which the best policy is chosen. 0.30, 0.35, 0.34,
    0.35 with plateau_evals 2 ends here (0.34 and 0.35 are no better than 0.35):

        >>> scores = [{"eval/accuracy_low": low} for low in (0.30, 0.35, 0.34, 0.35)]
        >>> plateau(scores, StopParams(plateau_evals=2))
        'plateau: 2 validation scores in a row are not above the best lower bound 0.350 by more than 0'
    """
    if params.plateau_evals is None:
        return None
    best, since = float("-inf"), 0
    for score in (m["eval/accuracy_low"] for m in history if "eval/accuracy_low" in m):
        is_better = score > best + params.plateau_min_gain
        best, since = (score, 0) if is_better else (best, since + 1)
    if since < params.plateau_evals:
        return None
    return (
        f"plateau: {since} validation scores in a row are not above the best lower bound {best:.3f} "
        f"by more than {params.plateau_min_gain:g}"
    )


def collapse(history: History, params: StopParams) -> str | None:
    """The reward broke down: its mean over the last window is below collapse_fraction of the best window's.

    Windows of collapse_window steps; nothing is said before two whole ones, nor while no window's mean is above 0.
    With windows of 2 and fraction 0.5, the last mean 0.15 is below half of the best, 0.5:

        >>> rewards = [{"rollout/raw_reward": r} for r in (0.4, 0.6, 0.2, 0.1)]
        >>> collapse(rewards, StopParams(collapse_fraction=0.5, collapse_window=2))
        'collapse: mean reward 0.150 over 2 steps, below 0.5 of the best such mean 0.500'
    """
    width = params.collapse_window
    rewards = [m["rollout/raw_reward"] for m in history if "rollout/raw_reward" in m]
    if params.collapse_fraction is None or len(rewards) < 2 * width:
        return None
    means = np.lib.stride_tricks.sliding_window_view(np.array(rewards), width).mean(axis=1)
    best, last = float(means.max()), float(means[-1])
    if best <= 0 or last >= params.collapse_fraction * best:
        return None
    return (
        f"collapse: mean reward {last:.3f} over {width} steps, below {params.collapse_fraction:g} "
        f"of the best such mean {best:.3f}"
    )


def gap(history: History, params: StopParams) -> str | None:
    """Sampler and learner drift apart: their logprobs differ by more than max_logprob_gap, gap_steps times in a row.

    >>> steps = [{"train/train_rollout_logprob_abs_diff": g} for g in (0.001, 0.2, 0.3)]
    >>> gap(steps, StopParams(max_logprob_gap=0.1, gap_steps=2))
    'gap: sampler and learner differ by 0.200, 0.300 nats a token, more than 0.1 for 2 steps in a row'
    """
    if params.max_logprob_gap is None:
        return None
    last = [m[GAP] for m in history if GAP in m][-params.gap_steps :]
    if len(last) < params.gap_steps or min(last) <= params.max_logprob_gap:
        return None
    return (
        f"gap: sampler and learner differ by {', '.join(f'{value:.3f}' for value in last)} nats a token, "
        f"more than {params.max_logprob_gap:g} for {len(last)} steps in a row"
    )


def gpu_hours(hours: float, params: StopParams) -> str | None:
    """The budget is spent: wall time times processes, parts before a resume included.

    >>> gpu_hours(8.25, StopParams(max_gpu_hours=8))
    'gpu_hours: 8.250 spent of 8'
    """
    if params.max_gpu_hours is None or hours < params.max_gpu_hours:
        return None
    return f"gpu_hours: {hours:.3f} spent of {params.max_gpu_hours:g}"


def reason_to_stop(history: History, hours: float, params: StopParams) -> str | None:
    """What the first rule that applies says; None: go on."""
    return (
        plateau(history, params)
        or collapse(history, params)
        or gap(history, params)
        or gpu_hours(hours, params)
    )
