"""Directories that `datasets.save_to_disk` wrote: Arrow files, of which state.json says which ones are rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pyarrow as pa

from polyturn.params import ParamsError

_STATE = "state.json"


def saved_files(directory: Path) -> tuple[Path, ...]:
    """The Arrow files of a saved data set or of all splits of one, in order; none if `directory` holds no such.

    Caches of `map` and `filter` lie beside them under other names.

    Raises:
        ParamsError: a state.json is none of a data set.
    """
    found: list[Path] = []
    for state in sorted([*directory.glob(_STATE), *directory.glob(f"*/{_STATE}")]):
        try:
            names = [
                str(file["filename"]) for file in json.loads(state.read_bytes())["_data_files"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ParamsError(
                f"data.path: {state} is none that datasets.save_to_disk wrote ({type(error).__name__}: {error}); "
                "save the data set again"
            ) from None
        found += [state.parent / name for name in names]
    return tuple(found)


def read_arrow(path: Path) -> Iterator[Mapping[str, object]]:
    """Stream the rows of one such file; pictures stay encoded.

    Raises:
        ParamsError: it is missing or no Arrow stream.
    """
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                yield from cast("list[dict[str, object]]", batch.to_pylist())
    except (OSError, ValueError) as error:  # Arrow has classes of its own of each
        raise ParamsError(
            f"data.path: {path} is not a readable Arrow stream, as datasets.save_to_disk writes it: {error}"
        ) from None
