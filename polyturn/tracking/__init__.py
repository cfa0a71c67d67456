"""MLflow: runs, environment capture, dataset lineage and the model registry; the only importer of mlflow.

mlflow takes one to two seconds to import, so the package's names are loaded on first use (PEP 562): a module that
writes `from polyturn import tracking` pays only when it opens a run.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.tracking.run import Run, open_run
    from polyturn.tracking.store import TrackingError

# Read when mlflow is imported; none reaches a result.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# What is not taken waits in the outbox: MLflow's own seven retries would hold a training step up for minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
# Each trace is waited for, and MLflow's thread for traces looks only once a second whether it may end.
os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")

__all__ = ["Run", "TrackingError", "open_run"]

_HOMES = {"Run": "run", "open_run": "run", "TrackingError": "store"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
