"""Is the champion still there? Its weights, and the data that it was made from, can be deleted behind the registry's back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from polyturn.params import Params
from polyturn.pipeline import dvc_objects
from polyturn.tracking.delivery import speaking
from polyturn.tracking.evaluations import RUN_TAG
from polyturn.tracking.model_store import DVC_TAG, EXTERNAL_TAG
from polyturn.tracking.needs import recorded_outs
from polyturn.tracking.store import Store, connect

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

ALIASES = ("champion", "challenger")


def check_champion(root: Path, params: Params) -> list[str] | None:
    """What is missing of champion and challenger of registry.name, in words; [] if nothing is, None without that model.

    Weights are looked for in MLflow or, where they are DVC's, in the cache of the checkout and in its remote; so is
    the data in the dvc.lock of the run that registered them. A teammate's `dvc gc` keeps neither.

    Raises:
        TrackingError: MLflow does not answer.
        DvcError: the DVC remote does not answer.
    """
    store = connect(params.tracking, root)
    name = params.registry.name
    with speaking(store):
        try:
            aliases = store.client.get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        found: list[str] = []
        for alias in ALIASES:
            if alias in aliases:
                version = store.client.get_model_version(name, str(aliases[alias]))
                label = f"{name}@{alias} (version {version.version})"
                found += [f"{label}: {line}" for line in _missing(store, version, root)]
        return found


def _missing(store: Store, version: ModelVersion, root: Path) -> Iterator[str]:
    tags = version.tags
    if tags.get(EXTERNAL_TAG) == "true":
        if lost := _lost(root, tags[DVC_TAG]):
            yield (
                f"{len(lost)} objects of its weights ({lost[0]}, ...) are neither in DVC's cache nor in its remote; "
                "bring them with `dvc pull` where they still are and `dvc push` them, or promote another version"
            )
    elif not _has_weights(store, str(version.source)):
        yield "its weights are not in MLflow's artifact store any more; promote another version"
    run_id = str(tags.get(RUN_TAG, version.run_id))
    gone = [
        path for path, md5 in recorded_outs(store, run_id).items()
        if md5 != tags.get(DVC_TAG) and _lost(root, md5)
    ]  # fmt: skip
    if gone:
        yield (
            f"{', '.join(sorted(gone))} of its run are neither in DVC's cache nor in its remote, so `polyturn "
            "reproduce` has to make them anew"
        )


def _lost(root: Path, md5: str) -> list[str]:
    """What is in neither place."""
    here = set(dvc_objects.ObjectCache.of(root).missing(md5))
    if not here:
        return []
    there = dvc_objects.missing_in_remote(root, md5)
    if md5 in there:
        return sorted(here)
    return sorted(there if md5 in here else here & set(there))


def _has_weights(store: Store, source: str) -> bool:
    model = store.client.get_logged_model(source.removeprefix("models:/"))
    repository = get_artifact_repository(
        str(model.artifact_location), tracking_uri=store.addresses.uri
    )
    try:
        return any(name.endswith(".safetensors") for name in _names(repository))
    except (MlflowException, OSError) as error:
        logger.warning("%s cannot be listed: %s", source, error)
        return False


def _names(repository: ArtifactRepository, directory: str | None = None) -> Iterator[str]:
    for item in repository.list_artifacts(directory):
        if item.is_dir:
            yield from _names(repository, str(item.path))
        else:
            yield str(item.path)
