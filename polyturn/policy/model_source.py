"""Where `model.path` lies: a directory here, an s3:// address or an id of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

from polyturn.params import ModelParams
from polyturn.pipeline.checkout import from_checkout
from polyturn.policy.model import ModelError

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.jinja")


def resolve(
    params: ModelParams, download_dir: Path, *, endpoint_url: str | None
) -> tuple[Path, str | None]:
    """The local directory of `model.path` and, for a hub id, the resolved commit hash.

    A directory is used as it is; s3:// is downloaded with boto3 from `endpoint_url` (None: AWS) and a hub id with
    huggingface_hub, both to `download_dir`, safetensors and text files only.

    Raises:
        ModelError: nothing is there, or the store or the hub does not deliver it.
    """
    path = cast("str", params.path)
    if path.startswith("s3://"):
        return _download_s3(path, download_dir, endpoint_url), None
    if (directory := from_checkout(path)).is_dir():
        return directory, None
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model.path: directory {path} does not exist; name a Hugging Face directory, hub id "
            "or s3:// URI, or null to build the small model"
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (only hub ids need it)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    try:
        snapshot = snapshot_download(
            path,
            revision=params.revision,
            cache_dir=download_dir,
            allow_patterns=list(_WANTED),
        )
    except HFValidationError as error:
        raise ModelError(
            f"model.path: {path} is no directory here and no hub id: {' '.join(str(error).split())}"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"model.path: {path} is no directory here and the hub did not deliver it "
            f"({type(error).__name__}); check the id, model.revision and the network"
        ) from None
    return Path(snapshot), Path(snapshot).name


def _download_s3(uri: str, download_dir: Path, endpoint_url: str | None) -> Path:
    """Files that an earlier download left are removed: the model may have been replaced by one of other shards.

    Objects whose name ends with a slash are no files; consoles put them there to show an empty folder.
    """
    from polyturn.objects import Objects, ObjectsError  # noqa: PLC0415  (boto3; only s3:// paths need it)

    target = download_dir / hashlib.sha256(uri.encode()).hexdigest()[:16]
    shutil.rmtree(target, ignore_errors=True)
    try:
        objects = Objects(uri, endpoint_url=endpoint_url)
        names = [
            name
            for name in objects.names()
            if any(fnmatch(name, pattern) for pattern in _WANTED) and ".." not in Path(name).parts
        ]
        for name in names:
            objects.download(name, target / name)
    except (ObjectsError, OSError) as error:
        raise ModelError(f"model.path: {uri} cannot be read: {error}") from None
    if not names:
        raise ModelError(f"model.path: no {' or '.join(_WANTED)} lies under {uri}")
    return target
