"""`polyturn stop` across machines: a tag of the MLflow run, which the training process looks at now and then."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from mlflow.entities import Run as MlflowRun
from mlflow.entities import RunTag
from mlflow.exceptions import MlflowException

from polyturn.login import user
from polyturn.params import TrackingParams
from polyturn.tracking.run import Run
from polyturn.tracking.store import Store, TrackingError, connect
from polyturn.training import stop_request
from polyturn.training.stop_request import NoRunError

logger = logging.getLogger(__name__)

TAG = "polyturn.stop"
_POLL_S = 5.0


def ask(name: str, tracking: TrackingParams, root: Path) -> str:
    """Tag the open run `name` (an MLflow run id, or the name of its flow run); return its id.

    Raises:
        NoRunError: no open run is called so.
        TrackingError: the store does not answer.
    """
    store = connect(tracking, root)
    run = _open_run(store, name)
    if run is None:
        raise NoRunError(
            f"no open run of {store.addresses.uri!r} has the id or the flow run {name!r}; a run that waits for a worker "
            "is ended by `prefect flow-run cancel`"
        )
    run_id = str(run.info.run_id)
    store.client.log_batch(run_id, tags=[RunTag(TAG, user())])
    return run_id


def watch(run: Run, directory: Path, *, every_s: float = _POLL_S) -> None:
    """Pass on, from a thread of its own, what `ask` asks of `run` or of the run around it, to the run in `directory`.

    A server that is away is asked again: training does not wait for it.
    """
    end = threading.Event()

    def look() -> None:
        while not end.wait(every_s):
            try:
                by = run.tags().get(TAG) or run.parent_tags().get(TAG)
            except TrackingError as error:
                logger.debug("stop requests cannot be read now: %s", error)
                continue
            if by:
                stop_request.ask_in(directory, f"polyturn stop of {by}")
                return

    threading.Thread(target=look, daemon=True, name="stop requests").start()


def _open_run(store: Store, name: str) -> MlflowRun | None:
    try:
        found = [store.client.get_run(name)]
    except MlflowException:
        quoted = name.replace("'", "")
        wanted = f"attributes.status = 'RUNNING' and tags.`prefect.flow_run_name` = '{quoted}'"
        found = list(store.client.search_runs([store.experiment_id], wanted))
    return next((run for run in found if run.info.status == "RUNNING"), None)
