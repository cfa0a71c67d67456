"""How often an evaluation set was used to compare policies: every comparison is a tagged run, and they are counted.

A set that decides between many policies is no longer unseen: the best of m is partly the luckiest of m.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.evaluation.compare import Scored
from polyturn.tracking.run import Run
from polyturn.tracking.store import Store

_SET_TAG = "comparison.set"
_PAIR_TAG = "comparison.pair"
_PAGE = 1000


@dataclass(frozen=True)
class Count:
    """Comparisons made on one set, and how many different pairs they were of."""

    total: int
    pairs: int


def record(run: Run, first: Scored, second: Scored) -> None:
    """Let `run` stand for the comparison of two policies.

    Raises:
        TrackingError: the store refuses.
    """
    run.set_tags({_SET_TAG: first.evaluation, _PAIR_TAG: _pair(first, second)})


def count(store: Store, evaluation: str, *, also: tuple[Scored, Scored] | None = None) -> Count:
    """The comparisons recorded on a set; with `also`, as if that one had been recorded as well."""
    found: list[str] = []
    token: str | None = None
    while True:
        page = store.client.search_runs(
            [store.experiment_id],
            f"tags.`{_SET_TAG}` = '{evaluation}'",
            max_results=_PAGE,
            page_token=token,
        )
        found += [run.data.tags.get(_PAIR_TAG, "") for run in page]
        token = page.token
        if not token:
            break
    if also:
        found.append(_pair(*also))
    return Count(len(found), len(set(found)))


def _pair(first: Scored, second: Scored) -> str:
    """The pair without its order."""
    return " ".join(sorted((first.key, second.key)))
