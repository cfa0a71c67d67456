"""Runs whose process was killed (SIGKILL, power) stay RUNNING: the next start closes them, at once on the same host,
elsewhere when their last sign of life is old."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

from mlflow.entities import RunTag

from polyturn import processes
from polyturn.tracking.store import Store

logger = logging.getLogger(__name__)

_HOST_TAG = "polyturn.host"
_PROCESS_TAG = "polyturn.process"
_HEARTBEAT_TAG = "polyturn.heartbeat"  # Unix time, written every minute
_SILENCE_S = 900.0  # so long without a sign of life is death: several outages of the server fit in


def owner_tags() -> dict[str, str]:
    """Tags that say which process owns a run."""
    return {
        _HOST_TAG: _host(),
        _PROCESS_TAG: str(processes.current()),
        **heartbeat_tags(time.time()),
    }


def heartbeat_tags(now_s: float) -> dict[str, str]:
    """The tag that says when the owner was last seen alive."""
    return {_HEARTBEAT_TAG: f"{now_s:.0f}"}


def close_orphans(store: Store) -> list[str]:
    """Mark RUNNING runs whose process is gone (on this host) or long silent (elsewhere) as KILLED; returns their ids."""
    running = store.client.search_runs([store.experiment_id], "attributes.status = 'RUNNING'")
    dead: list[str] = []
    for run in running:
        reason = _cause_of_death(run.data.tags)
        if reason:
            _close(store, str(run.info.run_id), reason)
            dead.append(str(run.info.run_id))
    return dead


def close_lost(store: Store, parent_run_id: str, stage: str, reason: str) -> list[str]:
    """Mark the RUNNING runs of `stage` nested in a run as KILLED: their worker is known to be gone; returns their ids."""
    wanted = (
        f"attributes.status = 'RUNNING' and tags.stage = '{stage}' "
        f"and tags.`mlflow.parentRunId` = '{parent_run_id}'"
    )
    lost = [str(run.info.run_id) for run in store.client.search_runs([store.experiment_id], wanted)]
    for run_id in lost:
        _close(store, run_id, reason)
    return lost


def _close(store: Store, run_id: str, reason: str) -> None:
    store.client.log_batch(run_id, tags=[RunTag("ended_by", reason)])
    store.client.set_terminated(run_id, "KILLED")
    logger.warning("run %s was left open (%s): marked KILLED", run_id, reason)


def _cause_of_death(tags: Mapping[str, str]) -> str | None:
    owner, heartbeat = tags.get(_PROCESS_TAG), tags.get(_HEARTBEAT_TAG)
    if owner and tags.get(_HOST_TAG) == _host():
        return None if processes.parse(owner).is_alive else "process found dead"
    if heartbeat and time.time() - float(heartbeat) > _SILENCE_S:
        return f"no sign of life of its host for {_SILENCE_S / 60:.0f} minutes"
    return None


def _host() -> str:
    """Host name and process namespace: containers of one host name must not judge each other's process ids."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
