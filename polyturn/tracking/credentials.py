"""Whether a server asks who is there, and the credential of those who may promote."""

from __future__ import annotations

import os

import requests

from polyturn.tracking.store import Store, TrackingError

USERNAME, PASSWORD = "POLYTURN_PROMOTER_USERNAME", "POLYTURN_PROMOTER_PASSWORD"

_UNAUTHORIZED = 401
_TIMEOUT_S = 10.0


class CredentialError(TrackingError):
    """Promoting needs a credential that was not given; the message names the variables."""


def are_asked_for(store: Store) -> bool:
    """Whether the server refuses a caller without credentials; a SQLite file never does."""
    if store.addresses.database is not None:
        return False
    return _asks(store.addresses.uri)


def become_promoter(uri: str) -> None:
    """Let this process speak as the promoter, where the server at `uri` asks for credentials.

    Those of training (MLFLOW_TRACKING_USERNAME) are not enough, so that a job that trains cannot promote what it made.

    Raises:
        CredentialError: the server asks, and the promoter's variables are not set.
    """
    if not uri.startswith("http") or not _asks(uri):
        return
    username, password = os.environ.get(USERNAME), os.environ.get(PASSWORD)
    if not username or not password:
        raise CredentialError(
            f"promoting takes a credential of its own at {uri!r}: set {USERNAME} and {PASSWORD} to a user who may edit "
            "the registered model (docs/registry.md)"
        )
    os.environ["MLFLOW_TRACKING_USERNAME"] = username
    os.environ["MLFLOW_TRACKING_PASSWORD"] = password


def _asks(uri: str) -> bool:
    """Where nothing answers without a proxy, that a credential is set stands for being asked for one."""
    status = _status_without(uri)
    return status == _UNAUTHORIZED or (status is None and "MLFLOW_TRACKING_USERNAME" in os.environ)


def _status_without(uri: str) -> int | None:
    """Status of a call without credentials; None where nothing answers."""
    session = requests.Session()
    session.trust_env = False  # no .netrc
    try:
        answer = session.post(
            f"{uri}/api/2.0/mlflow/experiments/search", json={"max_results": 1}, timeout=_TIMEOUT_S
        )
    except requests.RequestException:
        return None
    return answer.status_code
