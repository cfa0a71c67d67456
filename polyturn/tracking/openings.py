"""Each scoring of a sealed split is a tagged run: how often one was opened, and for which versions."""

from __future__ import annotations

from polyturn.tracking.run import Run
from polyturn.tracking.store import Store

_SET_TAG = "sealed.set"
_LABEL_TAG = "sealed.version"


def record(run: Run, evaluation: str, label: str) -> None:
    """Let `run` stand for an opening.

    Raises:
        TrackingError: the store refuses.
    """
    run.set_tags({_SET_TAG: evaluation, _LABEL_TAG: label})


def count(store: Store, evaluation: str) -> int:
    """How often the sealed split of this digest was opened."""
    wanted = f"tags.`{_SET_TAG}` = '{evaluation}'"
    return len(store.client.search_runs([store.experiment_id], wanted))


def find(store: Store, evaluation: str, label: str) -> str | None:
    """The run that holds a version's results on it; None if it was never opened for that version."""
    wanted = f"tags.`{_SET_TAG}` = '{evaluation}' and tags.`{_LABEL_TAG}` = '{label}'"
    found = store.client.search_runs([store.experiment_id], wanted, max_results=1)
    return str(found[0].info.run_id) if found else None
