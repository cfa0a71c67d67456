"""Runs whose process was killed (SIGKILL, power) stay RUNNING; the next start on the same host closes them."""

from __future__ import annotations

import logging
import os
import socket

from mlflow.entities import RunTag

from polyturn import processes
from polyturn.tracking.store import Store

logger = logging.getLogger(__name__)

_HOST_TAG = "polyturn.host"
_PROCESS_TAG = "polyturn.process"


def owner_tags() -> dict[str, str]:
    """Tags that say which process owns a run."""
    return {_HOST_TAG: _host(), _PROCESS_TAG: str(processes.current())}


def close_orphans(store: Store) -> list[str]:
    """Mark the RUNNING runs of this host whose process is gone as KILLED; returns their ids."""
    running = store.client.search_runs(
        [store.experiment_id],
        f"attributes.status = 'RUNNING' and tags.`{_HOST_TAG}` = '{_host()}'",
    )
    dead: list[str] = []
    for run in running:
        owner = run.data.tags.get(_PROCESS_TAG)
        if owner and not processes.parse(owner).is_alive:
            run_id = str(run.info.run_id)
            store.client.log_batch(run_id, tags=[RunTag("ended_by", "process found dead")])
            store.client.set_terminated(run_id, "KILLED")
            logger.warning("run %s was left open by a dead process: marked KILLED", run_id)
            dead.append(run_id)
    return dead


def _host() -> str:
    """Host name and process namespace: containers of one host name must not judge each other's process ids."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
