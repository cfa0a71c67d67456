"""Metrics of a run as they were logged, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.exceptions import MlflowException

from polyturn.tracking.store import Store

Points = dict[int, float]  # step -> the value logged last for it


def read(store: Store, run_id: str, names: Sequence[str]) -> dict[str, Points]:
    """The history of each metric that the run has; {} for a run that the store does not know."""
    found: dict[str, Points] = {}
    for name in names:
        try:
            points = store.client.get_metric_history(run_id, name)
        except MlflowException:
            return {}
        if points:
            in_order = sorted(points, key=lambda point: (point.step, point.timestamp))
            found[name] = {int(point.step): float(point.value) for point in in_order}
    return found


def names(store: Store, run_id: str) -> list[str]:
    """Names of the run's metrics, sorted; [] for a run that the store does not know."""
    try:
        return sorted(store.client.get_run(run_id).data.metrics)
    except MlflowException:
        return []


def tags(store: Store, run_id: str) -> dict[str, str]:
    """A run's tags; {} for a run that the store does not know."""
    try:
        return dict(store.client.get_run(run_id).data.tags)
    except MlflowException:
        return {}
