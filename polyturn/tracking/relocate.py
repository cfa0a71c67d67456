"""Moving a project: MLflow's SQLite store holds absolute artifact addresses, which are rewritten here."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),  # mlflow.artifactLocation, where a trace's pictures are
)


def relocate(database: Path, old: str, new: str) -> int:
    """Replace the prefix `old` by `new` in every stored artifact address; returns how many rows changed.

    Raises:
        sqlite3.Error: the file is no MLflow database; nothing is changed then.
    """
    changed = 0
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for table, column in _COLUMNS:
            statement = (
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # names from _COLUMNS
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?"
            )
            prefix = old.rstrip("/") + "/"
            values = (new.rstrip("/"), len(old.rstrip("/")) + 1, old, len(prefix), prefix)
            changed += connection.execute(statement, values).rowcount
    return changed
