"""Where the weights of a registered policy are: a LoggedModel that holds them, or one that points at DVC's object."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from polyturn.pipeline.dvc_objects import DvcError, ObjectCache
from polyturn.tracking import flavour
from polyturn.tracking.delivery import is_away
from polyturn.tracking.lineage import listed_digest
from polyturn.tracking.store import Store, TrackingError

logger = logging.getLogger(__name__)

DVC_TAG = "dvc.md5"  # of a model and its version: DVC's digest of the policy directory
EXTERNAL_TAG = "external"  # of the same: "true" where MLflow holds no weights
DIGEST_TAG = "policy.digest"
FLAVOUR = "flavour"  # folder of an external model: what makes the fetched directory a pyfunc model


class ModelStoreError(TrackingError):
    """The weights cannot be had back as they are; nothing was registered."""


@dataclass(frozen=True)
class Policy:
    """A policy directory on its way into the registry; `params` and `root` are for its pyfunc flavour.

    `dvc_md5` is what dvc.lock says of the directory; None where DVC does not know it.
    """

    directory: Path
    digest: str
    params: Mapping[str, object]
    root: Path
    dvc_md5: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(p.stat().st_size for p in self.directory.rglob("*") if p.is_file())


def store_policy(
    store: Store, policy: Policy, *, tags: Mapping[str, str], source_run: str, max_size: int
) -> str:
    """Make the LoggedModel of a policy; the weights go into it up to `max_size` bytes. Returns its id.

    Raises:
        ModelStoreError: it does not come back with the same digest.
        MlflowException: the store refuses or does not answer.
    """
    is_external = _is_external(policy, max_size)
    model_id = upload(store, policy, tags=tags, source_run=source_run, is_external=is_external)
    try:
        check(store, f"models:/{model_id}", policy)
    except BaseException:
        store.client.finalize_logged_model(model_id, LoggedModelStatus.FAILED)
        raise
    store.client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    return model_id


def upload(
    store: Store,
    policy: Policy,
    *,
    tags: Mapping[str, str],
    source_run: str | None,
    is_external: bool,
) -> str:
    """Make a LoggedModel, still pending, and write its files: straight to S3 where that is the artifact store.

    Raises:
        MlflowException: the store refuses or does not answer.
    """
    own = {**tags, EXTERNAL_TAG: str(is_external).lower()}
    if policy.dvc_md5:
        own[DVC_TAG] = policy.dvc_md5
    if is_external:
        own[MLFLOW_MODEL_IS_EXTERNAL] = "true"
    model = store.client.create_logged_model(
        store.experiment_id, name="policy", source_run_id=source_run, tags=own
    )
    model_id = str(model.model_id)
    try:
        _write(store, model_id, policy, is_external=is_external)
    except BaseException:
        store.client.finalize_logged_model(model_id, LoggedModelStatus.FAILED)
        raise
    return model_id


def check(store: Store, uri: str, policy: Policy) -> None:
    """Whether what the registry promises can be had: downloaded from MLflow, or whole in DVC's cache.

    Raises:
        ModelStoreError: it cannot, or is not the policy.
    """
    names = [p.relative_to(policy.directory) for p in policy.directory.rglob("*") if p.is_file()]
    with TemporaryDirectory() as scratch:
        directory = _download(store, uri, Path(scratch))
        if directory is not None and all((directory / name).is_file() for name in names):
            if listed_digest(directory, names) == policy.digest:
                return
        elif directory is not None and (directory / FLAVOUR).is_dir():
            _check_cache(policy)
            return
    raise ModelStoreError(
        f"{uri} downloads as other bytes than the policy directory holds; check the artifact store of "
        "tracking.artifact_location"
    )


def _is_external(policy: Policy, max_size: int) -> bool:
    if policy.size <= max_size:
        return False
    if policy.dvc_md5 is None:
        logger.warning(
            "registry.external_model_size: the policy is larger, but dvc.lock has no digest of %s to point at: it is "
            "stored in MLflow",
            policy.directory,
        )
    return policy.dvc_md5 is not None


def _write(store: Store, model_id: str, policy: Policy, *, is_external: bool) -> None:
    with TemporaryDirectory() as scratch:
        files = Path(scratch) / FLAVOUR
        flavour.write(files, policy.params, policy.root)
        if is_external:
            (Path(scratch) / "README.md").write_text(
                f"The weights are DVC's object {policy.dvc_md5}; `polyturn fetch-model` brings them.\n"
            )
            store.client.log_model_artifacts(model_id, scratch)
        else:
            store.client.log_model_artifacts(model_id, str(files))
            store.client.log_model_artifacts(model_id, str(policy.directory))


def _download(store: Store, uri: str, target: Path) -> Path | None:
    # A models:/ address is resolved by mlflow's process-wide store, whatever store is passed along.
    mlflow.set_tracking_uri(store.addresses.uri)
    mlflow.set_registry_uri(store.addresses.uri)
    try:
        return Path(download_artifacts(uri, dst_path=str(target)))
    except (MlflowException, OSError) as error:
        if store.addresses.database is None and is_away(error):
            raise
        logger.error("%s does not download: %s", uri, error)
        return None


def _check_cache(policy: Policy) -> None:
    """DVC's object is whole in the cache, and its files are those of the policy."""
    assert policy.dvc_md5 is not None
    try:
        cache = ObjectCache.of(policy.root)
        missing = cache.missing(policy.dvc_md5)
        wrong = [
            file.name
            for file in ([] if missing else cache.files(policy.dvc_md5))
            if _md5(policy.directory / file.name) != file.md5
        ]
    except (DvcError, OSError) as error:
        raise ModelStoreError(f"registry.external_model_size: {error}") from None
    if missing or wrong:
        raise ModelStoreError(
            f"registry.external_model_size: DVC's object {policy.dvc_md5} is not the policy "
            f"({', '.join((missing or wrong)[:3])} missing or changed); run `dvc commit train`"
        )


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
