"""`polyturn fetch-model`: the weights of a registered policy as a Hugging Face directory, wherever they are stored."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException

from polyturn.params import Params
from polyturn.pipeline import dvc_objects
from polyturn.tracking import flavour, versions
from polyturn.tracking.delivery import speaking
from polyturn.tracking.lineage import directory_digest, listed_digest
from polyturn.tracking.model_store import DIGEST_TAG, DVC_TAG, EXTERNAL_TAG, FLAVOUR
from polyturn.tracking.store import Store, TrackingError, connect

logger = logging.getLogger(__name__)


class FetchError(TrackingError):
    """The weights cannot be had, or are not those that were registered."""


def fetch_model(name: str, target: Path, params: Params, root: Path) -> Path:
    """Bring the policy that `name` stands for (models:/NAME@champion, champion, v3, NAME/3) to the directory `target`.

    Weights that MLflow does not hold come from the checkout's DVC cache, else its remote. from_pretrained and SGLang
    load the directory, and so does mlflow.pyfunc.load_model.

    Raises:
        FetchError: `target` exists, or what was fetched has another digest than what was registered.
        DvcError: the weights are neither in the cache nor in the remote.
        TrackingError: there is no such version, or the store does not answer.
    """
    if target.exists():
        raise FetchError(f"{target} exists; name another directory (--out)")
    store = connect(params.tracking, root)
    with speaking(store):
        version = versions.find_version(store, name, params.registry.name)
    tags, uri = dict(version.tags), f"models:/{version.name}/{version.version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        stored = _download(store, uri, Path(scratch) / "stored")
        if tags.get(EXTERNAL_TAG) == "true":
            fetched = Path(scratch) / "policy"
            dvc_objects.pull(root, tags[DVC_TAG], fetched)
            found = directory_digest(fetched)
            shutil.copytree(stored / FLAVOUR, fetched, dirs_exist_ok=True)
        else:
            fetched = stored
            found = _registered_digest(fetched)
        if found != tags.get(DIGEST_TAG):
            raise FetchError(
                f"{uri} has the digest {found[:12]}, {str(tags.get(DIGEST_TAG))[:12]} was registered: its files were "
                "changed where they are stored"
            )
        fetched.rename(target)
    return target


def _registered_digest(directory: Path) -> str:
    """Of the files that are the policy's own, not the flavour's."""
    names = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return listed_digest(directory, [name for name in names if str(name) not in flavour.NAMES])


def _download(store: Store, uri: str, target: Path) -> Path:
    # A models:/ address is resolved by mlflow's process-wide store.
    mlflow.set_tracking_uri(store.addresses.uri)
    mlflow.set_registry_uri(store.addresses.uri)
    target.mkdir()
    try:
        return Path(download_artifacts(uri, dst_path=str(target)))
    except (MlflowException, OSError) as error:
        raise FetchError(
            f"{uri} does not download ({' '.join(str(error).split())[:300]})"
        ) from None
