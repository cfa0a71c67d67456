"""A run beside its reproduction: digests, metrics and curve side by side, and where they part; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

# What holds a run id or a version number, so that it differs by design.
NOT_COMPARED = frozenset({"artifacts/train_run.json", "registered.json"})
_TIMED = ("perf/", "system/")  # metrics that depend on the machine's load

History = Mapping[str, Mapping[int, float]]  # metric -> step -> value


@dataclass(frozen=True)
class Row:
    """One thing that was compared; `was` is "" for what the run did not record."""

    stage: str
    what: str
    was: str
    now: str

    @property
    def is_same(self) -> bool:
        """Whether both are there and equal."""
        return bool(self.was) and self.was == self.now


@dataclass(frozen=True)
class FirstDifference:
    """Where two training curves part."""

    step: int
    metric: str
    was: float | None
    now: float | None


@dataclass(frozen=True)
class Change:
    """Something of the environment that is not as it was."""

    what: str
    was: str
    now: str


def digest_rows(
    was: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> list[Row]:
    """One row per out of either, in the order of the stages that ran now."""
    rows: list[Row] = []
    for stage in dict.fromkeys([*now, *was]):
        old, new = was.get(stage, {}), now.get(stage, {})
        rows += [
            Row(stage, path, old.get(path, ""), new.get(path, ""))
            for path in dict.fromkeys([*old, *new])
            if path not in NOT_COMPARED
        ]
    return rows


def metric_rows(was: Mapping[str, object], now: Mapping[str, object]) -> list[Row]:
    """One row per number of metrics.json, by dotted name."""
    old, new = dict(_leaves(was)), dict(_leaves(now))
    return [
        Row("evaluate", name, old.get(name, ""), new.get(name, ""))
        for name in dict.fromkeys([*old, *new])
    ]


def first_difference(was: History, now: History) -> FirstDifference | None:
    """The first step at which a metric is not the same to the last bit; None where all are.

    Times are left out. A metric or a step that only one of the two has counts as a difference.

    >>> first_difference({"loss": {0: 1.0, 1: 0.5}}, {"loss": {0: 1.0, 1: 0.25}})
    FirstDifference(step=1, metric='loss', was=0.5, now=0.25)
    """
    found = [
        FirstDifference(step, name, was.get(name, {}).get(step), now.get(name, {}).get(step))
        for name in sorted({*was, *now})
        if not name.startswith(_TIMED)
        for step in {*was.get(name, {}), *now.get(name, {})}
        if was.get(name, {}).get(step) != now.get(name, {}).get(step)
    ]
    return min(found, key=lambda difference: (difference.step, difference.metric), default=None)


def compared_metrics(names: Sequence[str]) -> list[str]:
    """Those of a run's metrics that a reproduction has to repeat."""
    return [name for name in names if not name.startswith(_TIMED)]


def environment_changes(was: Mapping[str, object], now: Mapping[str, object]) -> list[Change]:
    """What differs of Python, machine and packages; a package that one of the two lacks shows as absent."""
    changes = [
        Change(key, _shown(was.get(key)), _shown(now.get(key)))
        for key in ("python", "platform", "cpu_model", "gpus")
        if _shown(was.get(key)) != _shown(now.get(key))
    ]
    old = cast("Mapping[str, str]", was.get("packages", {}))
    new = cast("Mapping[str, str]", now.get("packages", {}))
    return changes + [
        Change(name, old.get(name, "absent"), new.get(name, "absent"))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        names = [item.get("name") if isinstance(item, Mapping) else item for item in value]
        return ", ".join(str(name) for name in names) or "none"
    return "unknown" if value is None else str(value)


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value)
