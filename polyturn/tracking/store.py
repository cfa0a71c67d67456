"""Where metrics go: tracking addresses, checked before work starts, and the connection to them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from alembic.util.exc import CommandError
from mlflow import MlflowClient
from mlflow.entities import Experiment, LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from requests import Response
from sqlalchemy.exc import SQLAlchemyError

from polyturn import layout
from polyturn.params import TrackingParams
from polyturn.pipeline.checkout import from_home, main_checkout
from polyturn.tracking import relocate, s3

logger = logging.getLogger(__name__)
# It tells of every attempt to reach a server that is away; so do we, once.
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
# The same of a database, with a traceback.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

URI_VARIABLE = "POLYTURN_TRACKING_URI"
ARTIFACTS_VARIABLE = "POLYTURN_ARTIFACT_LOCATION"

_SQLITE = "sqlite:///"
_POLL_S = 1.0


class TrackingError(ValueError):
    """MLflow cannot be used as configured; the message names the key, the value and the fix."""


class SilentServerError(TrackingError):
    """The server does not answer, or only that it cannot: it may later."""


@dataclass(frozen=True)
class Addresses:
    """Absolute tracking and artifact addresses; `artifacts` is None where the server decides."""

    uri: str
    artifacts: str | None

    @property
    def database(self) -> Path | None:
        """The SQLite file, if the store is one."""
        return Path(self.uri.removeprefix(_SQLITE)) if self.uri.startswith(_SQLITE) else None


@dataclass(frozen=True)
class Store:
    """A connected tracking store, the experiment that runs go to, and where records wait while it is away."""

    client: MlflowClient
    addresses: Addresses
    experiment_id: str
    outbox: Path


def resolve(tracking: TrackingParams, root: Path) -> Addresses:
    """Make the addresses absolute.

    Relative SQLite and artifact paths are taken from the main checkout, so that all worktrees share one store.
    POLYTURN_TRACKING_URI and POLYTURN_ARTIFACT_LOCATION go before params.yaml.

    Raises:
        TrackingError: tracking.uri is neither sqlite:/// nor http(s)://.
    """
    uri = os.environ.get(URI_VARIABLE) or tracking.uri
    location = os.environ.get(ARTIFACTS_VARIABLE) or tracking.artifact_location
    base = main_checkout(root)
    if uri.startswith(_SQLITE):
        database = base / from_home(uri.removeprefix(_SQLITE))
        uri = f"{_SQLITE}{database}"
        location = location or (database.parent / "mlartifacts").as_uri()
    elif urlsplit(uri).scheme not in ("http", "https"):
        raise TrackingError(
            f"tracking.uri must be sqlite:///PATH or http(s)://HOST:PORT, got {uri!r}"
        )
    else:
        uri = _without_login(uri)
    if location and not urlsplit(location).scheme:
        location = (base / from_home(location)).as_uri()
    return Addresses(uri.rstrip("/"), location)


def _without_login(uri: str) -> str:
    """An address for logs, links and messages: a name and password in it go where MLflow looks for them first."""
    parts = urlsplit(uri)
    if parts.username is None:
        return uri
    os.environ.setdefault("MLFLOW_TRACKING_USERNAME", unquote(parts.username))
    os.environ.setdefault("MLFLOW_TRACKING_PASSWORD", unquote(parts.password or ""))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def connect(tracking: TrackingParams, root: Path, *, wait_s: float = 0.0) -> Store:
    """Reach the store, and get or make the experiment; a server that is away is waited for, for `wait_s` at most.

    A fresh SQLite file is initialised under a file lock, so that several processes may start at once.

    Raises:
        TrackingError: the server or the artifact store does not answer within tracking.timeout_s, refuses,
            or the database cannot be used.
    """
    addresses = resolve(tracking, root)
    outbox = main_checkout(root) / layout.STATE / "outbox"
    end = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            return _connect(tracking, addresses, outbox)
        except SilentServerError as error:
            if time.monotonic() >= end:
                raise
            if not is_told:
                logger.warning("%s; it is waited for, %g s (tracking.outage_s)", error, wait_s)
                is_told = True
            time.sleep(_POLL_S)


def _connect(tracking: TrackingParams, addresses: Addresses, outbox: Path) -> Store:
    if addresses.database is None:
        check_server(addresses.uri, tracking.timeout_s)
    _check_artifacts(addresses.artifacts, tracking.timeout_s)
    with store_lock(addresses):
        store, location = _open(addresses, tracking.experiment, outbox)
    if (
        location != addresses.artifacts
    ):  # an experiment keeps its place, and a server has one of its own
        _check_artifacts(location, tracking.timeout_s)
    return store


def _check_artifacts(location: str | None, timeout_s: float) -> None:
    if location and location.startswith("s3://"):
        try:
            s3.check(location, timeout_s)
        except s3.S3Error as error:
            raise TrackingError(f"tracking.artifact_location {error}") from None


def in_file(database: Path) -> Store:
    """The store in a SQLite file, whatever params and environment name; for reading runs by their ids."""
    uri = f"{_SQLITE}{database}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    return Store(client, Addresses(uri, None), "0", database.parent / layout.STATE / "outbox")


def _open(addresses: Addresses, experiment: str, outbox: Path) -> tuple[Store, str]:
    """The store, and where its experiment keeps artifacts."""
    try:
        client = MlflowClient(tracking_uri=addresses.uri, registry_uri=addresses.uri)
        found = client.get_experiment_by_name(experiment) or _create(client, addresses, experiment)
        _follow_a_move(addresses, str(found.artifact_location))
    except CommandError as error:  # of the migrations: a file of a later MLflow
        raise TrackingError(
            f"tracking.uri {addresses.uri!r} was written by another version of MLflow ({first_line(error)}); install that "
            "version, or name another file"
        ) from None
    except (MlflowException, SQLAlchemyError, OSError) as error:
        is_away = isinstance(error, MlflowException) and error.get_http_status_code() >= 500
        is_silent = is_locked(error) if addresses.database else is_away
        kind = SilentServerError if is_silent else TrackingError
        raise kind(
            f"tracking.uri {addresses.uri!r} cannot be used ({first_line(error)}); "
            "check the address, or set tracking.uri: sqlite:///mlflow.db"
        ) from None
    if found.lifecycle_stage == LifecycleStage.DELETED:
        raise TrackingError(
            f"tracking.experiment {experiment!r} was deleted at {addresses.uri!r}; restore it there, or name another"
        )
    return Store(client, addresses, str(found.experiment_id), outbox), str(found.artifact_location)


def _create(client: MlflowClient, addresses: Addresses, name: str) -> Experiment:
    _make_directory(addresses.artifacts)
    try:
        return client.get_experiment(client.create_experiment(name, addresses.artifacts))
    except MlflowException as error:
        # On a server, where no lock holds others off, somebody else may have been faster.
        found = client.get_experiment_by_name(name)
        if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
            raise
        return found


def _follow_a_move(addresses: Addresses, stored: str) -> None:
    """MLflow stores absolute artifact paths: when the project was moved, put the new one in their place."""
    if addresses.database is None or addresses.artifacts in (None, stored):
        return
    old, new = local_path(stored), local_path(addresses.artifacts or "")
    if old and new and new.is_dir() and not old.exists():
        logger.warning("artifacts moved from %s to %s: updating %s", old, new, addresses.database)
        relocate.relocate(addresses.database, stored, new.as_uri())
    else:
        logger.warning(
            "tracking.artifact_location %s is ignored: the experiment stores at %s; "
            "name another tracking.experiment to change it",
            addresses.artifacts,
            stored,
        )


def local_path(uri: str) -> Path | None:
    """The path of a file: URI or of a plain path; None for anything else."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme and uri else None


def _make_directory(uri: str | None) -> None:
    directory = local_path(uri) if uri else None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def store_lock(addresses: Addresses) -> Iterator[None]:
    """One process at a time on this SQLite store (first use, registration); no lock for a server."""
    database = addresses.database
    if database is None:
        yield
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = database.with_name(f"{database.name}.lock").open("a")
    except OSError as error:
        raise TrackingError(
            f"tracking.uri {addresses.uri!r} cannot be written ({error}); name a writable path"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise TrackingError(
                f"tracking.uri {addresses.uri!r} lies where files cannot be locked ({error}), as on some network file "
                "systems, where SQLite loses data; name a path on a local disk, or a server"
            ) from None
        yield


def is_locked(error: BaseException) -> bool:
    """Whether another program holds a SQLite file (a backup, a viewer, a slow disk), longer than MLflow has waited."""
    return "database is locked" in str(error)


def check_server(uri: str, timeout_s: float) -> None:
    """One small request.

    Raises:
        SilentServerError: no answer in time, or an error of the server's own (5xx).
        TrackingError: it answers and refuses.
    """
    # Not /health: it answers 200 also where the host check or authentication would refuse every call.
    endpoint = "/api/2.0/mlflow/experiments/search"
    try:
        answer = http_request(
            get_default_host_creds(uri),
            endpoint,
            "POST",
            max_retries=0,
            timeout=timeout_s,
            raise_on_status=False,
            json={"max_results": 1},
        )
    except MlflowException as error:
        raise SilentServerError(
            f"tracking.uri {uri!r} does not answer within tracking.timeout_s {timeout_s:g} "
            f"({first_line(error)}); start the server, or set tracking.uri: sqlite:///mlflow.db"
        ) from None
    response = cast("Response", answer)  # http_request is not annotated
    if response.status_code != 200:
        kind = SilentServerError if response.status_code >= 500 else TrackingError
        raise kind(
            f"tracking.uri {uri!r} answers {response.status_code} {response.reason} "
            f"({response.text[:120].strip()!r}); check the address, MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, and the server's --allowed-hosts"
        )


def first_line(error: BaseException) -> str:
    """What an error says, in one line of some length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
