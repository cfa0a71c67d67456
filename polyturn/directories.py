"""Directories that come and go as a whole, also where some program holds a file in them open.

On NFS an open file stays in its directory under another name, so that the directory can neither be removed nor renamed
over.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def replace(built: Path, out: Path) -> None:
    """Rename a finished directory to `out`, in place of what is there.

    Raises:
        OSError: it cannot be renamed.
    """
    aside: Path | None = None
    if out.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        out.rename(aside)
    built.rename(out)
    if aside is not None:
        remove(aside)


def remove(directory: Path) -> None:
    """Remove what is not needed any more; if that fails it stays, with a warning: no reason to end a run."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s could not be removed: %s", directory, error)
