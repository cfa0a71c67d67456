"""Counts of what went wrong in environments over a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.types import Trajectory


def env_failure_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Failures of all attempts, those that a retry made good included, and how many attempts were retries."""
    counts = [t.env_failures for t in trajectories]
    return {
        "env/errors": float(sum(count.num_errors for count in counts)),
        "env/timeouts": float(sum(count.num_timeouts for count in counts)),
        "env/close_failures": float(sum(count.num_close_failures for count in counts)),
        "env/retries": float(sum(count.num_retries for count in counts)),
    }
