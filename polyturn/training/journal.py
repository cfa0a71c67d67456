"""A training run's journal: when each step was first finished, and with which metrics; it outlives kills.

A step that is sampled again after a kill comes out the same, so it keeps the first time's timestamp and durations: sent
to MLflow as often as one likes, it is one point of the history. A step that comes out differently is told.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SHOWN = 5  # names in a warning


def now_ms() -> int:
    """Unix time in milliseconds."""
    return int(time.time() * 1000)


@dataclass(frozen=True)
class Entry:
    """One step: `at_ms` (Unix time) and `times` (perf/...) are those of its first end.

    `is_end`: the score of the last policy, which no rollout follows.
    """

    step: int
    is_end: bool
    at_ms: int
    metrics: Mapping[str, float]
    times: Mapping[str, float]


class Journal:
    """Lines of JSON in `path`; None keeps them in memory alone. `clock` gives milliseconds."""

    def __init__(self, path: Path | None, clock: Callable[[], int] = now_ms) -> None:
        self._path = path
        self._clock = clock
        self._entries: dict[tuple[int, bool], Entry] = {}
        if path is not None and path.exists():
            self._entries = {(entry.step, entry.is_end): entry for entry in _read(path)}

    def enter(
        self,
        step: int,
        metrics: Mapping[str, float],
        times: Mapping[str, float],
        *,
        is_end: bool = False,
    ) -> Entry:
        """The entry of a step that has just been finished, or of which a checkpoint tells; written if it is new."""
        known = self._entries.get((step, is_end))
        if known is not None:
            changed = _changed(known.metrics, metrics)
            if not changed:
                return known
            logger.warning(
                "step %d came out differently than before the run was stopped, first in %s; an environment's time "
                "limit or another number of processes can do that",
                *(step, ", ".join(changed[:_SHOWN])),
            )
        entry = Entry(step, is_end, self._clock(), dict(metrics), dict(times))
        self._entries[(step, is_end)] = entry
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return entry


def _read(path: Path) -> list[Entry]:
    """All whole lines that can be read; one that a kill cut short is removed, so that the next starts afresh."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    entries: list[Entry] = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError) as error:
            logger.warning(
                "%s line %d is passed over, its step enters MLflow with the time of now: %s",
                *(path, number, error),
            )
    return entries


def _changed(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """Names whose values differ; compared as JSON, in which NaN equals NaN."""

    def text(values: Mapping[str, float], name: str) -> str | None:
        return json.dumps(float(values[name])) if name in values else None

    return sorted(name for name in old.keys() | new.keys() if text(old, name) != text(new, name))
