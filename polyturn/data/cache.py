"""The fetch cache: bodies by content, URLs by key; killed at any moment, it holds only whole bodies.

A failure that another try would repeat (404, not an image) is remembered as well, so that a stage that was
killed does not ask again; `forget_failures` clears them when a run stops because of them.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from polyturn.data.files import atomic_path
from polyturn.data.quarantine import RowError

_SMALL_BYTES = 65536


@dataclass(frozen=True)
class Body:
    """Fetched bytes and their sha256."""

    data: bytes
    sha256: str


class FetchCache:
    """The index and small bodies in `directory`/index.sqlite, large ones as files in bodies/; used as a context.

    A body of a few KB costs a fraction of a file's creation as a row of the database.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._index = sqlite3.connect(directory / "index.sqlite", timeout=60, isolation_level=None)
        self._index.execute("PRAGMA journal_mode=WAL")
        self._index.execute("PRAGMA synchronous=NORMAL")  # no commit waits for the disk
        self._index.execute(
            "CREATE TABLE IF NOT EXISTS bodies (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL)"
        )
        self._index.execute(
            "CREATE TABLE IF NOT EXISTS answers "
            "(key TEXT PRIMARY KEY, sha256 TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID"
        )

    def __enter__(self) -> FetchCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._index.close()

    def get(self, key: str) -> Body | None:
        """The body of a URL, None if it has to be fetched (again, if the file was lost or damaged).

        Raises:
            RowError: the remembered failure.
        """
        found = self._index.execute(
            "SELECT sha256, reason, detail FROM answers WHERE key = ?", (key,)
        ).fetchone()
        if found is None:
            return None
        sha256, reason, detail = map(str, found)
        if reason:
            raise RowError(reason, detail)
        return self._read(sha256)

    def _read(self, sha256: str) -> Body | None:
        found = self._index.execute(
            "SELECT data FROM bodies WHERE sha256 = ?", (sha256,)
        ).fetchone()
        try:
            data = bytes(found[0]) if found is not None else self._path(sha256).read_bytes()
        except FileNotFoundError:
            return None
        return Body(data, sha256) if hashlib.sha256(data).hexdigest() == sha256 else None

    def put(self, key: str, data: bytes) -> Body:
        """Keep a body: the content first, then the entry that makes it visible."""
        body = Body(data, hashlib.sha256(data).hexdigest())
        if len(data) > _SMALL_BYTES:
            with atomic_path(self._path(body.sha256)) as partial:
                partial.write_bytes(data)
            self._answer(key, body.sha256, "", "")
            return body
        # One transaction writes the log once.
        self._index.execute("BEGIN IMMEDIATE")
        self._index.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (body.sha256, data))
        self._answer(key, body.sha256, "", "")
        self._index.execute("COMMIT")
        return body

    def put_failure(self, key: str, error: RowError) -> None:
        """Remember a lasting failure."""
        self._answer(key, "", error.reason, error.detail)

    def _answer(self, *columns: str) -> None:
        self._index.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", columns)

    def forget_failures(self) -> None:
        """Ask again for everything that failed."""
        self._index.execute("DELETE FROM answers WHERE reason != ''")

    def _path(self, sha256: str) -> Path:
        return self._directory / "bodies" / sha256[:2] / sha256
