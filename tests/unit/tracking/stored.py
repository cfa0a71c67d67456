"""Looks into a project's store from outside."""

from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run as StoredRun


def stored_runs(root: Path) -> list[StoredRun]:
    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))
