"""The model registry: a published policy becomes a version with its evaluation, and perhaps the champion."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mlflow.entities import Dataset, DatasetInput, LoggedModelInput, Metric
from mlflow.exceptions import MlflowException

from polyturn.evaluation.statistics import Interval
from polyturn.params import RegistryParams
from polyturn.tracking import comparisons, credentials, promotion, versions
from polyturn.tracking.delivery import is_conflict, speaking
from polyturn.tracking.evaluations import RUN_TAG, SET_TAG
from polyturn.tracking.lineage import directory_digest
from polyturn.tracking.model_store import (
    DIGEST_TAG,
    DVC_TAG,
    EXTERNAL_TAG,
    ModelStoreError,
    Policy,
    check,
    store_policy,
)
from polyturn.tracking.promotion import CHALLENGER, CHAMPION, Rule, Verdict
from polyturn.tracking.run import Run
from polyturn.tracking.store import Store, TrackingError, store_lock

logger = logging.getLogger(__name__)

_ACCURACY = "accuracy"
_ATTEMPTS = 5  # to judge while others move aliases
_MAX_DIGEST = 36  # characters of a dataset's digest


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
    params: Mapping[str, object] = field(
        default_factory=dict
    )  # those that it answers under, as a tree
    dvc_md5: str | None = None  # of the directory, in dvc.lock


@dataclass(frozen=True)
class Registration:
    """What became of a candidate; `reason` says why the alias is what it is."""

    name: str
    version: int
    alias: str
    reason: str


def register(
    run: Run, candidate: Candidate, params: RegistryParams, *, rule: Rule, root: Path
) -> Registration:
    """Register the policy, and make it champion if there is none or the promotion rule says so.

    `run` must hold the results by problem already (`evaluations.log`). On a server that asks for credentials, or with
    registry.promote_on_register false, it becomes challenger: `polyturn promote` then moves the champion.

    Idempotent: equal weights with an equal evaluation give the version that is there. Nothing is registered that
    does not download again with the same digest, and no alias moves before the version does.

    Raises:
        RegistryError: the model store gives back other bytes.
        TrackingError: the store refuses or does not answer.
    """
    digest = directory_digest(candidate.directory)
    policy = Policy(candidate.directory, digest, candidate.params, root, candidate.dvc_md5)
    with speaking(run.store), store_lock(run.store.addresses):
        version = _find(run.store, params.name, digest, candidate.evaluation)
        if version is None:
            version = _create(run, candidate, policy, params)
        uri = f"models:/{params.name}/{version}"
        try:
            check(run.store, uri, policy)
        except ModelStoreError as error:
            raise RegistryError(f"registry.name: {error}; its aliases were not moved") from None
        verdict = _settle(run, params, version, rule, root)
    logger.info("%s is %s: %s", uri, verdict.alias, verdict.reason)
    return Registration(params.name, version, verdict.alias, verdict.reason)


def _find(store: Store, name: str, digest: str, evaluation: str) -> int | None:
    wanted = f"name = '{name}' and tags.`{DIGEST_TAG}` = '{digest}'"
    found = [
        int(version.version)
        for version in store.client.search_model_versions(wanted)
        if version.tags.get(SET_TAG) == evaluation
    ]
    return min(found, default=None)


def _create(run: Run, candidate: Candidate, policy: Policy, params: RegistryParams) -> int:
    client, name = run.store.client, params.name
    source_run = _known_run(run, candidate.source_run_id)
    tags = {
        **candidate.tags,
        DIGEST_TAG: policy.digest,
        SET_TAG: candidate.evaluation,
        RUN_TAG: run.run_id,
        _ACCURACY: repr(candidate.accuracy.mean),
        "accuracy_low": repr(candidate.accuracy.low),
        "accuracy_high": repr(candidate.accuracy.high),
        **{f"pass_at_{k}": repr(value) for k, value in candidate.pass_at_k.items()},
    }
    try:
        model_id = store_policy(
            run.store, policy, tags=tags, source_run=source_run, max_size=params.external_model_size
        )
    except ModelStoreError as error:
        raise RegistryError(f"registry.name {name!r}: {error}; no version was made") from None
    _link_metrics(run, model_id, candidate)
    _ensure_registered_model(run.store, name)
    stored = client.get_logged_model(model_id).tags
    tags |= {key: str(stored[key]) for key in (EXTERNAL_TAG, DVC_TAG) if key in stored}
    created = client.create_model_version(
        name, f"models:/{model_id}", run_id=source_run, tags=tags, model_id=model_id
    )
    return int(created.version)


def _known_run(run: Run, run_id: str | None) -> str:
    """`run_id` if this store knows it (a policy restored from a cache may come from another store)."""
    if run_id:
        try:
            return str(run.store.client.get_run(run_id).info.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
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
    asked = Dataset("test problems", candidate.evaluation[:_MAX_DIGEST], "local", "{}")
    metrics = [
        Metric(
            key,
            value,
            now,
            0,
            model_id=model_id,
            dataset_name=asked.name,
            dataset_digest=asked.digest,
            run_id=run.run_id,
        )
        for key, value in values.items()
    ]
    client = run.store.client
    client.log_inputs(run.run_id, [DatasetInput(asked)], models=[LoggedModelInput(model_id)])
    client.log_batch(run.run_id, metrics=metrics)


def _ensure_registered_model(store: Store, name: str) -> None:
    try:
        store.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _settle(run: Run, params: RegistryParams, version: int, rule: Rule, root: Path) -> Verdict:
    """Judge and move the alias; again while another registration on the same server moves aliases meanwhile.

    A server has no lock: what is compared with is the champion before and after judging, and an alias that two
    registrations give away for the first time is a conflict in its database.
    """
    for _ in range(_ATTEMPTS):
        before = _champion(run.store, params.name)
        verdict = _judge(run, params, version, rule, root)
        if _champion(run.store, params.name) != before:
            continue
        try:
            promotion.move(run.store, params.name, version, verdict.alias, verdict.reason)
        except MlflowException as error:
            if not is_conflict(error):
                raise
            logger.warning("registry.name %r: another registration moved an alias meanwhile; judging again", params.name)  # fmt: skip
        else:
            return verdict
    raise RegistryError(
        f"registry.name {params.name!r}: other registrations moved its aliases {_ATTEMPTS} times meanwhile; version "
        f"{version} is registered without an alias: run the stage again"
    )


def _champion(store: Store, name: str) -> int | None:
    found = promotion.champion(store, name)
    return None if found is None else int(found.version)


def _judge(run: Run, params: RegistryParams, version: int, rule: Rule, root: Path) -> Verdict:
    store = run.store
    entry = versions.of_version(store.client.get_model_version(params.name, str(version)))
    verdict = promotion.judge(store, entry, rule, partial(versions.load, store, root=root))
    if verdict.comparison is not None:
        comparisons.record(run, verdict.comparison.first, verdict.comparison.second)
    if verdict.alias != CHAMPION or CHAMPION in entry.aliases:
        return verdict
    if not params.promote_on_register:
        why = "registry.promote_on_register is false"
    elif credentials.are_asked_for(store):
        why = "promoting takes a credential of its own on this server"
    else:
        return verdict
    return replace(
        verdict, alias=CHALLENGER, reason=f"{verdict.reason}; {why}: `polyturn promote` moves it"
    )
