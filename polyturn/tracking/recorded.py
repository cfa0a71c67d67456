"""What MLflow recorded of a past pipeline run: code, params, environment, digests of its data, and how it went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from polyturn import layout
from polyturn.tracking.evaluations import TRAINED_BY_TAG
from polyturn.tracking.lineage import outs_by_stage
from polyturn.tracking.record import DIFF, ENVIRONMENT, RECORD
from polyturn.tracking.store import Store, TrackingError

_PARENT_TAG = "mlflow.parentRunId"
_REDACTED_TAG = "diff.redacted"


class RecordError(TrackingError):
    """A run is not there, or what it recorded is not enough to run it again."""


@dataclass(frozen=True)
class Recorded:
    """A pipeline run as MLflow knows it; parts that it never got to are empty.

    `outs` maps a stage to its outs' digests (path -> md5 as in dvc.lock). `stages` maps a stage to the MLflow run that it
    was last run by. `environment` is environment.json.
    """

    run_id: str
    name: str
    commit: str
    diff: str
    is_redacted: bool
    params: str  # params.yaml
    lock: str  # dvc.lock
    outs: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, object]
    metrics: Mapping[str, object]  # metrics.json
    stages: Mapping[str, str]
    tags: Mapping[str, str]  # of the training run

    @property
    def untracked(self) -> Sequence[str]:
        """Files that git did not know and that the diff does not hold."""
        names = cast("Sequence[str]", self.environment.get("untracked", ()))
        return [name for name in names if f" b/{name}\n" not in self.diff]


def read(store: Store, run_id: str) -> Recorded:
    """The record of a pipeline run, from its own id or that of any of its stages' runs.

    Raises:
        RecordError: there is no such run, or it lacks commit or params.
    """
    run = _get(store, run_id)
    members = _members(store, run)
    stages = {
        member.data.tags["stage"]: str(member.info.run_id)
        for member in reversed(members)  # newest last, so that it stays
        if "stage" in member.data.tags
    }
    with TemporaryDirectory() as directory:
        files = _Files(store, Path(directory))
        environment = json.loads(files.text(run_id, f"{ENVIRONMENT}/{RECORD}") or "{}")
        holders = [run_id, *(stages[s] for s in ("register",) if s in stages)]
        lock = next((t for h in holders if (t := files.text(h, layout.DVC_LOCK.name))), "")
        metrics = next((t for h in holders if (t := files.text(h, layout.METRICS.name))), "")
        diff = files.text(run_id, f"{ENVIRONMENT}/{DIFF}")
        params = files.text(run_id, f"{ENVIRONMENT}/{layout.PARAMS.name}")
    commit = environment.get("commit")
    if not commit or not params:
        missing = "git commit" if not commit else "params.yaml"
        raise RecordError(
            f"run {run_id} recorded no {missing}: it ran outside a git repository, or under a version of polyturn that "
            "did not record it"
        )
    trained = _get(store, stages["train"]).data.tags if "train" in stages else {}
    return Recorded(
        run_id=run_id,
        name=str(run.info.run_name),
        commit=str(commit),
        diff=diff,
        is_redacted=_REDACTED_TAG in run.data.tags,
        params=params,
        lock=lock,
        outs=outs_by_stage(lock),
        environment=environment,
        metrics=json.loads(metrics or "{}"),
        stages=stages,
        tags=dict(trained),
    )


@dataclass(frozen=True)
class _Files:
    """Text artifacts of runs."""

    store: Store
    directory: Path

    def text(self, run_id: str, name: str) -> str:
        """The text; "" where the run has none of that name."""
        target = self.directory / run_id
        target.mkdir(exist_ok=True)
        try:
            path = self.store.client.download_artifacts(run_id, name, str(target))
        except (MlflowException, OSError):
            return ""
        return Path(path).read_bytes().decode(errors="surrogateescape")  # line ends as they are


def _get(store: Store, run_id: str) -> MlflowRun:
    try:
        return store.client.get_run(run_id)
    except MlflowException:
        raise RecordError(f"tracking.uri {store.addresses.uri!r} has no run {run_id}") from None


def _members(store: Store, run: MlflowRun) -> list[MlflowRun]:
    """The stages' runs of the same pipeline run, newest first; where a stage came from the cache, the one that made it."""
    run_id, experiments = str(run.info.run_id), [str(run.info.experiment_id)]

    def search(tag: str, value: str) -> list[MlflowRun]:
        return list(store.client.search_runs(experiments, f"tags.`{tag}` = '{value}'"))

    parent = run.data.tags.get(_PARENT_TAG, run_id)
    found = [*([run] if "stage" in run.data.tags else []), *search(_PARENT_TAG, parent)]
    if run.data.tags.get("stage") == "train":
        found += search(TRAINED_BY_TAG, run_id)
    known = {member.data.tags.get("stage") for member in found}
    trained_by = [m.data.tags[TRAINED_BY_TAG] for m in found if TRAINED_BY_TAG in m.data.tags]
    if "train" not in known and trained_by:
        found.append(_get(store, trained_by[0]))
    return found
