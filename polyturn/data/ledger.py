"""Outcomes of the images stage on disk while it runs, so that memory does not grow with the rows."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.data.files import atomic_path
from polyturn.data.outcome import ImageOutcome
from polyturn.data.quarantine import SetAside

_BATCH = 2048
SHARED = "shared_with_train"


_COLUMNS = tuple(column.name for column in fields(ImageOutcome))
_values = attrgetter(*_COLUMNS)
MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string()),
        pa.field("split", pa.string()),
        pa.field("position", pa.int32()),
        pa.field("url", pa.string()),
        pa.field("status", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("source_sha256", pa.string()),
        pa.field("source_bytes", pa.int64()),
        pa.field("source_format", pa.string()),
        pa.field("source_mode", pa.string()),
        pa.field("source_width", pa.int32()),
        pa.field("source_height", pa.int32()),
        pa.field("num_frames", pa.int32()),
        pa.field("png_sha256", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
    ]
)


class Ledger:
    """A scratch database of rows and their images, in the order of the dataset; used as a context."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(
            "CREATE TABLE rows (ordinal INTEGER PRIMARY KEY, id TEXT, split TEXT, line TEXT, reason TEXT, detail TEXT)"
        )
        self._db.execute(
            f"CREATE TABLE images (ordinal INTEGER, position INTEGER, {', '.join(_COLUMNS)}, "
            "PRIMARY KEY (ordinal, position)) WITHOUT ROWID"
        )
        self._insert = f"INSERT INTO images VALUES (?, ?{', ?' * len(_COLUMNS)})"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._db.close()

    def add(
        self, ordinal: int, row: Mapping[str, object], outcomes: Sequence[ImageOutcome]
    ) -> None:
        """Record one row; it is set aside with the reason of its first unusable image."""
        bad = next((item for item in enumerate(outcomes) if item[1].reason), None)
        reason = bad[1].reason if bad else ""
        detail = f"image {bad[0]}, {bad[1].url}: {bad[1].detail}" if bad else ""
        rest = {key: value for key, value in row.items() if key != "images"}
        line = json.dumps(rest, ensure_ascii=False)
        self._db.execute(
            "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)",
            (ordinal, row["id"], row["split"], line, reason, detail),
        )
        self._db.executemany(
            self._insert, ((ordinal, i, *_values(outcome)) for i, outcome in enumerate(outcomes))
        )

    def set_aside_shared(self) -> int:
        """Set evaluation rows aside that show a picture of a kept train row; returns how many."""
        self._db.execute("CREATE INDEX IF NOT EXISTS by_picture ON images (png_sha256)")
        shared = self._db.execute(
            """SELECT r.ordinal, MIN(t.id) FROM rows r
            JOIN images i ON i.ordinal = r.ordinal
            JOIN images j ON j.png_sha256 = i.png_sha256
            JOIN rows t ON t.ordinal = j.ordinal
            WHERE r.split != 'train' AND r.reason = '' AND t.split = 'train' AND t.reason = ''
            GROUP BY r.ordinal"""
        ).fetchall()
        self._db.executemany(
            f"UPDATE rows SET reason = '{SHARED}', detail = ? WHERE ordinal = ?",
            (
                (
                    f"its picture is also in train row {train_id}; data.dedup_splits: false keeps it",
                    n,
                )
                for n, train_id in shared
            ),
        )
        return len(shared)

    def reasons(self) -> Counter[str]:
        """Number of rows by reason; "" counts the kept ones."""
        rows = self._db.execute("SELECT reason, COUNT(*) FROM rows GROUP BY reason")
        return Counter({str(reason): int(count) for reason, count in rows})

    def kept(self) -> Iterator[dict[str, object]]:
        """The kept rows in the dataset's order, with image records instead of sources."""
        for ordinal, line in self._db.execute(
            "SELECT ordinal, line FROM rows WHERE reason = '' ORDER BY ordinal"
        ):
            images = self._db.execute(
                "SELECT png_sha256, width, height FROM images WHERE ordinal = ? ORDER BY position",
                (ordinal,),
            )
            row = cast("dict[str, object]", json.loads(line))
            row["images"] = [{"sha256": sha, "width": w, "height": h} for sha, w, h in images]
            yield {
                key: row[key] for key in ("id", "split", "problem", "answer", "images", "metadata")
            }

    def set_aside(self) -> Iterator[SetAside]:
        """The rows that were set aside, in the dataset's order."""
        for name, split, reason, detail in self._db.execute(
            "SELECT id, split, reason, detail FROM rows WHERE reason != '' ORDER BY ordinal"
        ):
            yield SetAside(name, split, "images", reason, detail)

    def is_needed(self, png_sha256: str) -> bool:
        """Whether a kept row shows this picture."""
        found = self._db.execute(
            """SELECT 1 FROM images i JOIN rows r ON r.ordinal = i.ordinal
            WHERE i.png_sha256 = ? AND r.reason = '' LIMIT 1""",
            (png_sha256,),
        ).fetchone()
        return found is not None

    def write_manifest(self, path: Path) -> None:
        """Write manifest.parquet, one line per image, sorted by row id and position."""
        columns = ", ".join(
            f"i.{name}" for name in _COLUMNS if name not in ("url", "reason", "detail")
        )
        cursor = self._db.execute(
            f"""SELECT r.id, r.split, i.position, i.url,
            CASE r.reason WHEN '' THEN 'kept' ELSE 'set_aside' END, r.reason, {columns}
            FROM images i JOIN rows r ON r.ordinal = i.ordinal ORDER BY r.id, i.position"""
        )
        with (
            atomic_path(path) as partial,
            pq.ParquetWriter(partial, MANIFEST_SCHEMA, compression="zstd") as out,
        ):
            while rows := cursor.fetchmany(_BATCH):
                out.write_batch(_batch(rows))


def _batch(rows: Iterable[tuple[object, ...]]) -> pa.RecordBatch:
    arrays = [
        pa.array(list(values), type=column.type)
        for column, values in zip(MANIFEST_SCHEMA, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MANIFEST_SCHEMA)
