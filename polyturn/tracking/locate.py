"""The files of a run that is named by a directory, an MLflow run id or an alias of the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from polyturn import layout
from polyturn.params import Params
from polyturn.tracking.gallery import ARTIFACTS
from polyturn.tracking.store import Store, TrackingError, connect, resolve

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_MODEL = re.compile(r"(?:models:/)?(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/(?P<version>\d+))")


class LocateError(TrackingError):
    """There is no such run, or it keeps no trajectories; the message says where was looked."""


def locate(name: str, params: Params, root: Path) -> Path:
    """A directory with the trajectories of RUN; those of an MLflow run are downloaded into .polyturn/cache/runs.

    RUN is a path; a run id; an alias of registry.name (champion); MODEL@ALIAS, MODEL/VERSION, both also with
    models:/ in front. A run of the pipeline or of another stage leads to the training run beside it.

    Raises:
        LocateError: there is no such run, or it has no trajectories.
        TrackingError: the store does not answer.
    """
    if Path(name).exists():
        return Path(name)
    database = resolve(params.tracking, root).database
    if database is not None and not database.exists():
        raise LocateError(f"{name} is no path, and there are no runs yet at {database}")
    store = connect(params.tracking, root)
    run = _run(store, name) if _RUN_ID.fullmatch(name) else _registered(store, name, params)
    for candidate in (run, *_relatives(store, run)):
        run_id = str(candidate.info.run_id)
        if run_id == _own_run(root):
            return root
        if _has_trajectories(store, run_id):
            target = root / layout.STATE / "cache" / "runs" / run_id
            target.mkdir(parents=True, exist_ok=True)
            download_artifacts(
                run_id=run_id,
                artifact_path=ARTIFACTS,
                dst_path=str(target),
                tracking_uri=store.addresses.uri,
            )
            return target / ARTIFACTS
    raise LocateError(
        f"run {run.info.run_id} ({name}) keeps no trajectories, nor does its training run: tracking.trajectory_files "
        "was 0, or it did not get that far"
    )


def _run(store: Store, run_id: str) -> MlflowRun:
    try:
        return store.client.get_run(run_id)
    except MlflowException:
        raise LocateError(
            f"tracking.uri {store.addresses.uri!r} has no run {run_id}; and no such path exists"
        ) from None


def _registered(store: Store, name: str, params: Params) -> MlflowRun:
    parts = _MODEL.fullmatch(name)
    model = parts["name"] if parts else params.registry.name
    try:
        if parts and parts["version"]:
            version = store.client.get_model_version(model, parts["version"])
        else:
            alias = parts["alias"] if parts else name
            version = store.client.get_model_version_by_alias(model, alias)
    except MlflowException:
        raise LocateError(
            f"{name} is neither a path nor a run id, and the registry at {store.addresses.uri!r} has no such version "
            f"of {model}"
        ) from None
    return _run(store, str(version.run_id))


def _relatives(store: Store, run: MlflowRun) -> list[MlflowRun]:
    """Training runs of the same pipeline run: children of `run`, or of its parent."""
    parent = run.data.tags.get("mlflow.parentRunId", str(run.info.run_id))
    wanted = f"tags.`mlflow.parentRunId` = '{parent}' and tags.stage = 'train'"
    return list(store.client.search_runs([str(run.info.experiment_id)], wanted))


def _has_trajectories(store: Store, run_id: str) -> bool:
    return any(item.path == ARTIFACTS for item in store.client.list_artifacts(run_id))


def _own_run(root: Path) -> str | None:
    """The run that wrote the checkout's own trajectories."""
    try:
        return str(json.loads((root / layout.TRAIN_RUN).read_text())["run_id"])
    except (OSError, ValueError, KeyError):
        return None
