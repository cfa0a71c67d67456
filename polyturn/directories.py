"""Directories that come and go as a whole, also where some program holds a file in them open.

On NFS an open file stays in its directory under another name, so that the directory can neither be removed nor renamed
over.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def replace(built: Path, out: Path) -> None:
    """Make a finished directory `out`, in place of what is there; from another disk it is copied beside `out` first.

    Raises:
        OSError: it cannot be renamed or copied; what was at `out` is there still.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        _rename(built, out)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.new.", dir=out.parent) as beside:
            copy = Path(beside) / out.name
            shutil.copytree(built, copy, symlinks=True)
            _rename(copy, out)
        remove(built)


def _rename(built: Path, out: Path) -> None:
    if not out.exists():
        built.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    out.rename(aside)
    try:
        built.rename(out)
    except OSError:
        aside.rename(out)
        raise
    remove(aside)


def remove(directory: Path) -> None:
    """Remove what is not needed any more; if that fails it stays, with a warning: no reason to end a run."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s could not be removed: %s", directory, error)
