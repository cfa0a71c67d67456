"""An exclusive lease as an object of S3: renewed while its holder lives, taken over once it has been silent for its time.

All writes are conditional on the version that was read, so that of two who try at once one wins. A holder that cannot
reach the store keeps working, which harms nobody, but may not publish (`check`) until it has renewed the lease; one
whose lease somebody else has taken learns so by its next renewal.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polyturn import processes
from polyturn.objects import ChangedError, Objects, ObjectsError, Stored, UnreachableError
from polyturn.pipeline.lease import LeaseError

logger = logging.getLogger(__name__)

_RENEWALS = 3  # in the time after which a silent holder counts as dead
_LOOK_S = 1.0  # between looks at somebody else's lease; less if the lease is short


@dataclass(frozen=True)
class Holder:
    """What the lease object says; `machine` tells hosts, boots and containers apart, `beat` counts renewals."""

    token: str
    host: str
    machine: str
    process: str
    seconds: float
    beat: int = 0

    @property
    def is_known_dead(self) -> bool:
        """Whether it ran here, where one can see that it does no more."""
        return self.machine == _machine() and not processes.parse(self.process).is_alive

    def __str__(self) -> str:
        return f"pid {self.process.partition(':')[0]} on {self.host}"


class ObjectLease:
    """The lease `name` of a store, held from `acquire` to `release`; `on_loss` is called when somebody has taken it."""

    def __init__(
        self, objects: Objects, name: str, *, seconds: float, on_loss: Callable[[], None]
    ) -> None:
        self._objects = objects
        self._name = name
        self._seconds = seconds
        self._on_loss = on_loss
        self._holder = Holder(
            uuid.uuid4().hex, socket.gethostname(), _machine(), str(processes.current()), seconds
        )
        self._etag = ""
        self._renewed = 0.0  # monotonic
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._lost_to: str | None = None
        self._thread = threading.Thread(target=self._renew_until_ended, name="lease", daemon=True)

    def acquire(self, what: str) -> None:
        """Take the lease, waiting while it is unclear whether its holder lives; then renew it in a thread.

        Raises:
            LeaseError: a living process holds it.
            UnreachableError, ObjectsError: see `Objects`.
        """
        while not self._try(what):
            pass
        self._thread.start()

    def check(self) -> None:
        """Make sure that the lease is still this process's, so that it may publish.

        Raises:
            LeaseError: somebody else has taken it.
            UnreachableError: its time is over and it cannot be renewed now.
        """
        if time.monotonic() - self._renewed > self._seconds / 2:
            self._renew()
        if self._lost_to is not None:
            raise LeaseError(self._lost_to)

    @property
    def loss(self) -> LeaseError | None:
        """Who has taken it, once that is known."""
        return None if self._lost_to is None else LeaseError(self._lost_to)

    def release(self) -> None:
        """Stop to renew it and remove the object, if it is still this process's."""
        self._is_ended.set()
        self._thread.join()
        if self._lost_to is None:
            try:
                self._objects.delete(self._name, only=self._etag)
            except (ChangedError, UnreachableError, ObjectsError) as error:
                logger.warning(
                    "lease %s could not be removed and will go stale: %s", self._name, error
                )

    # -- taking it --------------------------------------------------------------------------------------------

    def _try(self, what: str) -> bool:
        found = self._objects.get(self._name)
        try:
            if found is None:
                self._took(self._objects.put_new(self._name, self._content()))
                return True
            holder = _read(found)
            if not self._has_ended(found, holder, what):
                return False
            who = str(holder) if holder else "somebody who did not sign it"
            self._took(self._objects.put_over(self._name, self._content(), found.etag))
        except ChangedError:
            return False  # somebody else was faster, or has ended: look again
        logger.warning("%s: the lease of %s, who is silent, is taken over", what, who)
        return True

    def _has_ended(self, found: Stored, holder: Holder | None, what: str) -> bool:
        """Whether the holder is dead, as known here or by its silence; False: its lease has gone meanwhile.

        Raises:
            LeaseError: it renewed its lease.
        """
        if holder is not None and holder.is_known_dead:
            return True
        seconds = holder.seconds if holder else self._seconds
        end = time.monotonic() + seconds - found.age_s
        if end > time.monotonic():
            logger.info(
                "%s: %s holds the lease, last heard of %.0f s ago; waiting for at most %.0f s",
                *(what, holder, found.age_s, seconds - found.age_s),
            )
        while time.monotonic() < end:
            time.sleep(min(_LOOK_S, seconds / 10))
            now = self._objects.get(self._name)
            if now is None:
                return False
            if now.etag != found.etag:
                raise LeaseError(
                    f"{what} is already running as {_read(now)}, which renewed its lease; wait until it ends, or stop it "
                    "there"
                )
        return True

    def _took(self, etag: str) -> None:
        self._etag = etag
        self._renewed = time.monotonic()

    def _content(self) -> bytes:
        return json.dumps(asdict(self._holder)).encode()

    # -- keeping it -------------------------------------------------------------------------------------------

    def _renew_until_ended(self) -> None:
        is_silent = False
        while not self._is_ended.wait(self._seconds / _RENEWALS):
            try:
                self._renew()
                is_silent = False
            except (UnreachableError, ObjectsError) as error:
                if not is_silent:
                    logger.warning("the lease cannot be renewed now: %s", error)
                is_silent = True
            if self._lost_to is not None:
                self._on_loss()
                return

    def _renew(self) -> None:
        with self._lock:
            if self._lost_to is not None or self._is_ended.is_set():
                return
            self._holder = replace(self._holder, beat=self._holder.beat + 1)
            try:
                self._took(self._objects.put_over(self._name, self._content(), self._etag))
            except ChangedError:
                self._find_out()

    def _find_out(self) -> None:
        """The object has changed: by a renewal of ours whose answer was lost, or by somebody else."""
        found = self._objects.get(self._name)
        holder = _read(found) if found else None
        if found and holder and holder.token == self._holder.token:
            self._took(found.etag)
            return
        self._lost_to = (
            f"the lease {self._objects.address}/{self._name} was taken over by {holder or 'nobody: it was removed'}, as "
            f"this process had not renewed it for {time.monotonic() - self._renewed:.0f} s; this run ends here"
        )


def _read(stored: Stored) -> Holder | None:
    try:
        return Holder(**json.loads(stored.data))
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    """Host, boot and process namespace: process ids can be compared where these are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
