"""Removing runs for good: their artifacts, and on SQLite their rows too."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from polyturn.tracking.delivery import speaking
from polyturn.tracking.store import Store

logger = logging.getLogger(__name__)


def remove_runs(store: Store, artifact_uris: Mapping[str, str]) -> None:
    """Delete runs (id -> artifact address) with what they stored.

    On a server the rows stay in its database, marked as deleted, until `mlflow gc` is run there.

    Raises:
        TrackingError: the store refuses or does not answer.
    """
    with speaking(store):
        for run_id, uri in artifact_uris.items():
            store.client.delete_run(run_id)
            try:
                get_artifact_repository(uri, tracking_uri=store.addresses.uri).delete_artifacts()
            except (MlflowException, OSError, NotImplementedError) as error:
                logger.warning("run %s is deleted, its files at %s are not: %s", run_id, uri, error)
    if store.addresses.database is not None:
        _forget(store.addresses.uri, list(artifact_uris))


def _forget(uri: str, run_ids: list[str]) -> None:
    command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", uri]
    for start in range(0, len(run_ids), 200):
        chosen = ",".join(run_ids[start : start + 200])
        result = subprocess.run(
            [*command, "--run-ids", chosen], capture_output=True, text=True, check=False
        )
        if result.returncode:
            logger.warning(
                "deleted runs keep their rows: %s", " ".join(result.stderr.split())[-300:]
            )
