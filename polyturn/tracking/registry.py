"""The model registry: a published policy becomes a version with its evaluation, and perhaps the champion."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import mlflow
from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException

from polyturn.params import RegistryParams
from polyturn.statistics import Interval
from polyturn.tracking.lineage import directory_digest
from polyturn.tracking.run import Run
from polyturn.tracking.store import Store, TrackingError, store_lock

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CHAMPION = "champion"
CHALLENGER = "challenger"

_POLICY = "policy.digest"
_EVALUATION = "evaluation.digest"
_ACCURACY = "accuracy"
_REASON = "{}.reason"  # tag of a version: why it has that alias
_OTHER_BYTES = "downloads as other bytes than the policy directory holds"


class RegistryError(TrackingError):
    """A policy cannot be registered; no version and no alias was changed unless the message says so."""


@dataclass(frozen=True)
class Candidate:
    """A policy with the evaluation that it is judged by.

    `evaluation` is the digest of the problems and of how they are scored: accuracies are compared only where it is
    equal. `tags` go to the version as they are (commit, digests of params and dvc.lock).
    """

    directory: Path
    evaluation: str
    accuracy: Interval
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    source_run_id: str | None = (
        None  # the run that trained it; None or unknown here: the registering run
    )


@dataclass(frozen=True)
class Registration:
    """What became of a candidate; `reason` says why the alias is what it is."""

    name: str
    version: int
    alias: str
    reason: str


def register(run: Run, candidate: Candidate, params: RegistryParams) -> Registration:
    """Register the policy and move the champion alias if it is better than the present champion.

    Idempotent: equal weights with an equal evaluation give the version that is there. Nothing is registered that
    does not download again with the same digest, and no alias moves before the version does.

    Raises:
        RegistryError: the model store gives back other bytes.
        TrackingError: the store refuses or does not answer.
    """
    digest = directory_digest(candidate.directory)
    try:
        with store_lock(run.store.addresses):
            version = _find(run.store, params.name, digest, candidate.evaluation)
            if version is None:
                version = _create(run, candidate, digest, params.name)
            uri = f"models:/{params.name}/{version}"
            if _downloaded_digest(run.store, uri) != digest:
                raise RegistryError(
                    f"registry.name: {uri} {_OTHER_BYTES}; its aliases were not moved; "
                    "check the artifact store of tracking.artifact_location"
                )
            alias, reason = _judge(run.store, params, version, candidate)
            _move_alias(run.store, params.name, version, alias, reason)
    except MlflowException as error:
        raise TrackingError(
            f"registry.name {params.name!r}: the registry at {run.store.addresses.uri!r} refused or "
            f"stopped answering ({str(error).splitlines()[0][:300]}); see tracking.uri"
        ) from None
    logger.info("%s is %s: %s", uri, alias, reason)
    return Registration(params.name, version, alias, reason)


def evaluation_digest(problem_lines: Iterable[str], settings: Mapping[str, object]) -> str:
    """Digest of an evaluation set: its problems as JSON lines, in order, and how they are scored."""
    total = hashlib.sha256()
    for line in problem_lines:
        total.update(line.strip().encode() + b"\n")
    total.update(json.dumps(settings, sort_keys=True).encode())
    return total.hexdigest()


def _find(store: Store, name: str, digest: str, evaluation: str) -> int | None:
    wanted = f"name = '{name}' and tags.`{_POLICY}` = '{digest}'"
    found = [
        int(version.version)
        for version in store.client.search_model_versions(wanted)
        if version.tags.get(_EVALUATION) == evaluation
    ]
    return min(found, default=None)


def _create(run: Run, candidate: Candidate, digest: str, name: str) -> int:
    client = run.store.client
    source_run = _known_run(run, candidate.source_run_id)
    tags = {
        **candidate.tags,
        _POLICY: digest,
        _EVALUATION: candidate.evaluation,
        _ACCURACY: repr(candidate.accuracy.mean),
        "accuracy_low": repr(candidate.accuracy.low),
        "accuracy_high": repr(candidate.accuracy.high),
        **{f"pass_at_{k}": repr(value) for k, value in candidate.pass_at_k.items()},
    }
    model = client.create_logged_model(
        run.store.experiment_id, name="policy", source_run_id=source_run, tags=tags
    )
    model_id = str(model.model_id)
    client.log_model_artifacts(model_id, str(candidate.directory))
    if _downloaded_digest(run.store, f"models:/{model_id}") != digest:
        client.finalize_logged_model(model_id, LoggedModelStatus.FAILED)
        raise RegistryError(
            f"registry.name {name!r}: models:/{model_id} {_OTHER_BYTES}; no version was "
            "made; check the artifact store of tracking.artifact_location"
        )
    client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    _link_metrics(run, model_id, candidate)
    _ensure_registered_model(run.store, name)
    created = client.create_model_version(
        name, f"models:/{model_id}", run_id=source_run, tags=tags, model_id=model_id
    )
    return int(created.version)


def _known_run(run: Run, run_id: str | None) -> str:
    """`run_id` if this store knows it (a policy restored from a cache may come from another store)."""
    if run_id:
        try:
            return str(run.store.client.get_run(run_id).info.run_id)
        except MlflowException:
            logger.warning("training run %s is not in this MLflow store", run_id)
    return run.run_id


def _link_metrics(run: Run, model_id: str, candidate: Candidate) -> None:
    now = int(time.time() * 1000)
    values = {
        _ACCURACY: candidate.accuracy.mean,
        "accuracy_low": candidate.accuracy.low,
        "accuracy_high": candidate.accuracy.high,
        **{f"pass_at_{k}": value for k, value in candidate.pass_at_k.items()},
    }
    metrics = [Metric(key, value, now, 0, model_id=model_id) for key, value in values.items()]
    run.store.client.log_batch(run.run_id, metrics=metrics)


def _ensure_registered_model(store: Store, name: str) -> None:
    try:
        store.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _downloaded_digest(store: Store, uri: str) -> str | None:
    """Digest of what `uri` downloads as; None if it does not."""
    # A models:/ address is resolved by mlflow's process-wide store, whatever store is passed along.
    mlflow.set_tracking_uri(store.addresses.uri)
    mlflow.set_registry_uri(store.addresses.uri)
    with TemporaryDirectory() as directory:
        try:
            path = download_artifacts(uri, dst_path=directory)
        except (MlflowException, OSError) as error:
            logger.error("%s does not download: %s", uri, error)
            return None
        return directory_digest(Path(path))


def _champion(store: Store, name: str) -> ModelVersion | None:
    aliases = store.client.get_registered_model(name).aliases
    if CHAMPION not in aliases:
        return None
    return store.client.get_model_version(name, str(aliases[CHAMPION]))


def _judge(
    store: Store, params: RegistryParams, version: int, candidate: Candidate
) -> tuple[str, str]:
    champion = _champion(store, params.name)
    if champion is None:
        return CHAMPION, "there was no champion"
    if int(champion.version) == version:
        return CHAMPION, champion.tags.get(_REASON.format(CHAMPION), "it is the champion already")
    if champion.tags.get(_EVALUATION) != candidate.evaluation:
        return CHALLENGER, (
            f"champion version {champion.version} was scored on another evaluation set; evaluate it on "
            "this one to compare, or move the alias by hand"
        )
    accuracy, best = candidate.accuracy.mean, float(champion.tags[_ACCURACY])
    found = f"accuracy {accuracy:.4f} against {best:.4f} of version {champion.version}"
    if accuracy - best > params.min_gain:
        return CHAMPION, f"{found}, a gain above registry.min_gain {params.min_gain:g}"
    return CHALLENGER, f"{found}, no gain above registry.min_gain {params.min_gain:g}"


def _move_alias(store: Store, name: str, version: int, alias: str, reason: str) -> None:
    client = store.client
    client.set_registered_model_alias(name, alias, str(version))
    client.set_model_version_tag(name, str(version), _REASON.format(alias), reason)
    aliases = client.get_registered_model(name).aliases
    if alias == CHAMPION and str(aliases.get(CHALLENGER)) == str(version):
        client.delete_registered_model_alias(name, CHALLENGER)
