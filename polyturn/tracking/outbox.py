"""What a server that is away has not taken yet: records on disk, delivered in order once it answers.

While it answers, a record goes out at once and nothing is written. The first that does not get through, and all that
follow, are appended to a file of the run and this process; a thread delivers them. A process that ends before leaves
the file to the next start (`leftovers`). A record may go out twice when an answer was lost: records are such that
twice is once (metrics have their first time, tags and files are overwritten).
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from polyturn import processes
from polyturn.types import Json

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # between attempts to reach a server that is away
_STOP_S = 5.0  # for a delivery that has begun
PATH = "path"  # key of a record: a file or directory that goes with it

Record = Mapping[str, Json]
Deliver = Callable[[str, Record], None]  # (run id, record)
_counter = itertools.count()


class DeliveryError(ValueError):
    """The server has taken a look at the record and refused it."""


class AwayError(DeliveryError):
    """The server does not answer, or not in its senses: the same record may get through later."""


@dataclass
class Outbox:
    """The records of one run that this process has not got rid of; `directory` holds those of all runs.

    `address` is the server's: files are delivered there and nowhere else.
    """

    directory: Path
    address: str
    run_id: str
    deliver: Deliver
    retry_s: float = RETRY_S
    _pending: deque[Record] = field(default_factory=deque[Record])
    _file: IO[str] | None = None
    _thread: threading.Thread | None = None
    _is_stopped: threading.Event = field(default_factory=threading.Event)
    _posting: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def post(self, record: Record) -> None:
        """Deliver a record, or keep it behind those that wait already; a kept record's files are copied.

        Raises:
            DeliveryError: the server refused it.
        """
        with self._posting:
            if not self.is_waiting:
                try:
                    return self.deliver(self.run_id, record)
                except AwayError as error:
                    logger.warning(
                        "%s; what run %s logs is kept in %s until it answers",
                        *(error, self.run_id, self.directory),
                    )
            return self._keep(record)

    @property
    def is_waiting(self) -> bool:
        """Whether records wait for the server."""
        with self._changed:
            return bool(self._pending)

    def wait(self, seconds: float) -> bool:
        """Wait until everything is delivered; False once nothing got through for so long."""
        with self._changed:
            left = len(self._pending)
            while left:
                if not self._changed.wait_for(lambda: len(self._pending) < left, seconds):  # noqa: B023
                    return False
                left = len(self._pending)
        return True

    def stop(self) -> None:
        """Leave what waits to the next start: nothing more is sent, and a delivery that has begun is waited for."""
        self._is_stopped.set()
        thread = self._thread
        if thread is not None:
            thread.join(_STOP_S)

    def _keep(self, record: Record) -> None:
        with self._changed:
            if self._file is None:
                self._file = _create(self.directory, self.address, self.run_id)
            kept = _with_copy(record, Path(self._file.name))
            _append(self._file, kept)
            self._pending.append(kept)
            if self._thread is None and not self._is_stopped.is_set():
                self._thread = threading.Thread(target=self._work, daemon=True, name="outbox")
                self._thread.start()

    def _work(self) -> None:
        while not self._is_stopped.is_set():
            with self._changed:
                if not self._pending:
                    assert self._file is not None
                    _remove(self._file)
                    self._file = self._thread = None
                    self._changed.notify_all()
                    logger.warning("run %s: the server has taken what was kept", self.run_id)
                    return
                record, path = self._pending[0], Path(self._file.name) if self._file else None
            if not _try(self.deliver, self.run_id, record):
                self._is_stopped.wait(self.retry_s)
                continue
            if path:
                _advance(path)
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()


def leftovers(directory: Path, address: str, deliver: Deliver) -> int:
    """Deliver what processes that have ended left for this address; returns how many records went out.

    What cannot be delivered now is left for the next time.
    """
    count = 0
    for path in sorted(directory.glob("*.jsonl")):
        with _taken(path) as file:
            if file is None:
                continue  # its process lives
            head, *records = _read(path) or [{}]
            if head.get("address") != address:
                continue
            for record in records[_num_delivered(path) :]:
                if not _try(deliver, str(head["run_id"]), record):
                    return count
                _advance(path)
                count += 1
            _remove(file)
    return count


def _try(deliver: Deliver, run_id: str, record: Record) -> bool:
    """False where it has to be tried again; what is refused is passed over and told."""
    try:
        deliver(run_id, record)
    except AwayError:
        return False
    except (DeliveryError, OSError) as error:
        logger.warning("run %s lacks its %s: %s", run_id, record.get("kind"), error)
    return True


def _create(directory: Path, address: str, run_id: str) -> IO[str]:
    directory.mkdir(parents=True, exist_ok=True)
    me = processes.current()
    path = directory / f"{run_id}-{me.pid}-{me.started}-{next(_counter)}.jsonl"
    file = path.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)  # for as long as the process lives
    _append(file, {"address": address, "run_id": run_id})
    return file


def _append(file: IO[str], record: Record) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _with_copy(record: Record, outbox: Path) -> Record:
    source = record.get(PATH)
    if not isinstance(source, str):
        return record
    target = outbox.with_suffix(".files") / str(next(_counter)) / Path(source).name
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(source).is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return {**record, PATH: str(target)}


def _read(path: Path) -> list[Record]:
    """Whole lines only: the last may have been cut by a kill."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _position(path: Path) -> Path:
    return path.with_suffix(".delivered")


def _num_delivered(path: Path) -> int:
    return _position(path).stat().st_size if _position(path).exists() else 0


def _advance(path: Path) -> None:
    """One byte per delivered record."""
    with _position(path).open("ab") as file:
        file.write(b".")


@contextmanager
def _taken(path: Path) -> Iterator[IO[str] | None]:
    with suppress(FileNotFoundError), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file if path.exists() else None


def _remove(file: IO[str]) -> None:
    path = Path(file.name)
    path.unlink(missing_ok=True)
    _position(path).unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(".files"), ignore_errors=True)
    file.close()
