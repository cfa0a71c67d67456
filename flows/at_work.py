"""Flow runs that are at work on this machine, as its Prefect server and its processes tell: both are asked, as each alone lies.

A server keeps a run Running whose process and worker have gone together; a process knows nothing of runs that wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Cancelling, Crashed

_OPEN = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_POLL_S = 0.5
_PROGRAMS = (b"prefect", b"flows")  # what a flow's process is called with


def find(client: SyncPrefectClient) -> list[FlowRun]:
    """Runs that have begun and not ended; not those whose process here is gone."""
    return [run for run in _open(client) if not _is_lost(run)]


def cancel(client: SyncPrefectClient, runs: Sequence[FlowRun], *, wait_s: float) -> list[FlowRun]:
    """Cancel runs, and give them `wait_s` to end and to say so; those that have not."""
    for run in runs:  # nobody is known who would end one without a process
        state = Cancelling if run.infrastructure_pid else Cancelled
        client.set_flow_run_state(run.id, state(message="the services are ended"))
    end = time.monotonic() + wait_s
    names = {run.id for run in runs}
    while left := [run for run in _open(client) if run.id in names]:
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    return left


def crash_the_lost(client: SyncPrefectClient) -> list[FlowRun]:
    """Mark runs whose process here is gone as Crashed, which nobody else would do; return them."""
    lost = [run for run in _open(client) if _is_lost(run)]
    for run in lost:
        state = Crashed(message="its process is gone: it ended together with worker or server")
        client.set_flow_run_state(run.id, state, force=True)
    return lost


def _open(client: SyncPrefectClient) -> list[FlowRun]:
    wanted = FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN))
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(state=wanted))


def _is_lost(run: FlowRun) -> bool:
    """Whether its process, a number on this machine, is not there; of containers and the like nothing is known here."""
    pid = run.infrastructure_pid
    if pid is None or not pid.isdigit():
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return not any(name in command for name in _PROGRAMS)  # empty: a zombie
