"""Policies by the names that people give them: a version, an alias, a run; and what each scored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from polyturn.evaluation.compare import Scored
from polyturn.tracking import evaluations, histories
from polyturn.tracking.evaluations import RUN_TAG, SET_TAG, TRAINED_BY_TAG
from polyturn.tracking.store import Store, TrackingError, first_line

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_TRAINING_RUN = "training run"  # key of an entry's facts
_REWARD = "rollout/raw_reward"
RUN_ID = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"v?(?P<number>\d+)")
_MODEL = re.compile(r"(?:models:/)?(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/v?(?P<version>\d+))")


class VersionError(TrackingError):
    """A name stands for no version or run, or for one that keeps no results; the message says what was looked for."""


@dataclass(frozen=True)
class Entry:
    """A scored policy; `model` and `version` are None for one that is known by its run only."""

    label: str
    model: str | None
    version: int | None
    aliases: tuple[str, ...]
    evaluation: str
    results_run_id: str
    facts: dict[str, str]


def find(store: Store, name: str, model: str) -> Entry:
    """What `name` stands for: v3 or 3 or an alias of `model`; MODEL@ALIAS, MODEL/3 (also with models:/); a run id.

    Raises:
        VersionError: there is no such version or run, or it was never scored.
    """
    if RUN_ID.fullmatch(name):
        return _of_run(store, name)
    return of_version(find_version(store, name, model))


def find_version(store: Store, name: str, model: str) -> ModelVersion:
    """The version that `name` stands for; see `find`.

    Raises:
        VersionError: there is none.
    """
    number = _NUMBER.fullmatch(name)
    parts = _MODEL.fullmatch(name)
    registered = parts["name"] if parts else model
    alias = (parts["alias"] if parts else name) or ""
    try:
        if number:
            return store.client.get_model_version(model, number["number"])
        if parts and parts["version"]:
            return store.client.get_model_version(registered, parts["version"])
        found = store.client.get_model_version_by_alias(registered, alias)
        # Through an alias the version comes without its aliases.
        return store.client.get_model_version(registered, str(found.version))
    except MlflowException as error:
        known = ", ".join(registered_models(store)) or "none"
        raise VersionError(
            f"{name!r} is no version, alias or run at {store.addresses.uri!r} (model {registered!r}: "
            f"{first_line(error)[:200]}); write v3, champion, MODEL@ALIAS, MODEL/3 or a run id; models there: "
            f"{known}"
        ) from None


def registered_models(store: Store) -> list[str]:
    """Names of the registry's models, sorted; [] where it does not answer."""
    try:
        return sorted(str(model.name) for model in store.client.search_registered_models())
    except MlflowException:
        return []


def of_version(version: ModelVersion) -> Entry:
    """The entry of a registered version.

    Raises:
        VersionError: it does not say what it was scored on.
    """
    tags, name = dict(version.tags), str(version.name)
    label = f"{name} v{version.version}"
    if SET_TAG not in tags or RUN_TAG not in tags:
        raise VersionError(
            f"{label} keeps no results by problem (tags {SET_TAG}, {RUN_TAG}); register it again with this version of "
            "polyturn: `dvc repro --force --single-item register`"
        )
    aliases = tuple(sorted(str(alias) for alias in version.aliases))
    facts = {
        "alias": ", ".join(aliases),
        _TRAINING_RUN: str(version.run_id),
        "commit": tags.get("git.commit", "")[:12],
        "params": tags.get("params.digest", "")[:12],
    }
    known = {key: value for key, value in facts.items() if value}
    return Entry(label, name, int(version.version), aliases, tags[SET_TAG], tags[RUN_TAG], known)


def load(store: Store, entry: Entry, root: Path) -> Scored:
    """The entry with its results by problem.

    Raises:
        TrackingError: the results cannot be had.
    """
    return Scored(
        entry.label,
        entry.evaluation,
        evaluations.read(store, entry.results_run_id, root),
        entry.facts,
        dict(store.client.get_run(entry.results_run_id).data.params),
        _curve(store, entry.facts.get(_TRAINING_RUN, "")),
        key=entry.results_run_id,
    )


def _of_run(store: Store, run_id: str) -> Entry:
    try:
        run = store.client.get_run(run_id)
    except MlflowException:
        raise VersionError(f"{store.addresses.uri!r} has no run {run_id}") from None
    holder = next((r for r in _around(store, run) if SET_TAG in r.data.tags), None)
    if holder is None:
        raise VersionError(
            f"run {run_id} keeps no results by problem, nor does a run of its pipeline: it did not get as far as "
            "the register stage"
        )
    facts = {
        _TRAINING_RUN: holder.data.tags.get(TRAINED_BY_TAG, ""),
        "commit": holder.data.tags.get("mlflow.source.git.commit", "")[:12],
    }
    known = {key: value for key, value in facts.items() if value}
    tags = holder.data.tags
    return Entry(f"run {run_id[:8]}", None, None, (), tags[SET_TAG], str(holder.info.run_id), known)


def _around(store: Store, run: MlflowRun) -> Iterator[MlflowRun]:
    """The run, the runs of its pipeline run, and those that registered what it trained; newest first in each."""
    yield run
    run_id, experiments = str(run.info.run_id), [str(run.info.experiment_id)]
    parent = run.data.tags.get("mlflow.parentRunId", run_id)
    for tag, value in (("mlflow.parentRunId", parent), (TRAINED_BY_TAG, run_id)):
        yield from store.client.search_runs(experiments, f"tags.`{tag}` = '{value}'")


def _curve(store: Store, run_id: str) -> list[float | None]:
    """The reward of every step of a training run; [] where it is not known here."""
    points = histories.read(store, run_id, [_REWARD]).get(_REWARD, {}) if run_id else {}
    return [points.get(step) for step in range(max(points, default=-1) + 1)]
