"""Metrics of many short steps, some steps to a call: one call to MLflow takes as long as a tenth of such a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.tracking.outbox import Record
    from polyturn.tracking.run import Run

_STEPS_PER_CALL = 20

LogStep = Callable[[Mapping[str, float | None], int], None]


@contextmanager
def gathered(run: Run) -> Iterator[LogStep]:
    """`run.log_metrics` for (metrics, step); what was logged is sent every 20 steps, and at the end of the block.

    Raises:
        TrackingError: the store refuses.
    """
    waiting: list[Record] = []

    def send() -> None:
        if waiting:
            run.post({"kind": "series", "steps": [dict(record) for record in waiting]})
            waiting.clear()

    def log(metrics: Mapping[str, float | None], step: int) -> None:
        waiting.append(run.record_of(metrics, step))
        if len(waiting) >= _STEPS_PER_CALL:
            send()

    try:
        yield log
    finally:
        send()
