"""Cancelling that outlives an outage of the server: Prefect's own watch of a run gives up after some twenty seconds without it.

The run would train on, and stay Cancelling for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled

logger = logging.getLogger(__name__)

_POLL_S = 10.0
_PATIENCE_S = (
    15.0  # in which Prefect's own watch of a deployment's run ends it, if it still watches
)
T = TypeVar("T")


def watched(work: Callable[[], T]) -> T | State[T]:
    """Do the work of this flow run; its state is Cancelled where that was asked for and nobody else has ended it.

    Prefect does not watch a run that was started by hand at all.
    """
    patience_s = _PATIENCE_S if deployment.get_id() else 0.0
    watch = _Watch(UUID(flow_run.get_id()), patience_s)
    watch.start()
    try:
        return work()
    except TerminationSignal:
        if not watch.has_ended_it:
            raise
        return Cancelled(message="cancelled, as the run itself has noticed")
    finally:
        watch.stop()


class _Watch:
    """Looks at the run's state from a thread of its own, and sends its process SIGTERM."""

    def __init__(self, run_id: UUID, patience_s: float) -> None:
        self.has_ended_it = False
        self._run_id = run_id
        self._patience_s = patience_s
        self._is_stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._look, daemon=True, name="cancelling").start()

    def stop(self) -> None:
        self._is_stopped.set()

    def _look(self) -> None:
        since: float | None = None
        while not self._is_stopped.wait(_POLL_S):
            if not self._is_cancelling():
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= self._patience_s:
                self.has_ended_it = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _is_cancelling(self) -> bool:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self._run_id).state
        except httpx.HTTPError as error:
            logger.debug("the state of this run cannot be read now: %s", error)
            return False
        return state is not None and state.is_cancelling()
