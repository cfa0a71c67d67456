"""Prefect's progress bar of a stage; a stage waits for no server to show it, and does not end with one."""

from __future__ import annotations

import contextvars
import threading
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from polyturn.progress import ProgressLine

_INTERVAL_S = 2.0  # between updates
_PARTING_S = 2.0  # in which the last one goes out


class ProgressArtifact:
    """Shows the newest line, from a thread of its own; made with the first line.

    Prefect's client waits up to minutes for a server that is away, and then raises.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._logger = get_run_logger()
        self._newest: ProgressLine | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        # The run that the artifact belongs to stands in the context.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), daemon=True)

    def show(self, line: ProgressLine) -> None:
        """Show a line as soon as the server takes it; one that a newer line overtakes is left out."""
        with self._changed:
            self._newest = line
            self._changed.notify_all()
        if not self._thread.is_alive() and not self._is_closed:
            self._thread.start()

    def close(self) -> None:
        """No more lines come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_PARTING_S)

    def _work(self) -> None:
        artifact: UUID | None = None
        is_told = False
        while line := self._next():
            try:
                artifact = _send(self._stage, artifact, line)
            except (httpx.HTTPError, RuntimeError) as error:  # away, or closed with the run
                if not is_told:
                    self._logger.warning("Prefect's server takes no progress (%s); the stage goes on", error)  # fmt: skip
                is_told = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _INTERVAL_S)

    def _next(self) -> ProgressLine | None:
        """Wait for a line that was not taken yet; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._is_closed)
            line, self._newest = self._newest, None
            return line


def _send(stage: str, artifact: UUID | None, line: ProgressLine) -> UUID:
    percent = min(100.0, 100.0 * line.done / max(1, line.total))
    if artifact is None:
        return create_progress_artifact(percent, key=f"progress-{stage}", description=line.text)  # pyright: ignore[reportReturnType]
    update_progress_artifact(artifact, percent, description=line.text)
    return artifact
