"""Running out of memory, told with the params keys to lower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class OutOfMemoryError(ValueError):
    """Memory ran out; the message names the params keys and their values."""


@contextmanager
def lowered_by(doing: str, keys: Mapping[str, object]) -> Iterator[None]:
    """Turn an allocation failure inside the block, on GPU or CPU, into one that names `keys`.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_memory and "can't allocate memory" not in str(error):
            raise
        values = ", ".join(f"{key} (now {value})" for key, value in keys.items())
        raise OutOfMemoryError(f"out of memory while {doing}: lower {values}") from error
