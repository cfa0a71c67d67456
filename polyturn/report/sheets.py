"""Contact sheets of the report: what the images stage kept, and what was set aside and why, as small pictures."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from polyturn import layout
from polyturn.data.contact_sheet import Tile, kept_tiles, set_aside_tiles
from polyturn.data.quarantine import read_quarantine

logger = logging.getLogger(__name__)

_NUM_TILES = 24
_SIDE = 240  # pixels of a small picture, for screens with two to a CSS pixel


@dataclass(frozen=True)
class Card:
    """One row of the dataset: its picture as a data URI (None: there is none to show), a line and a detail."""

    picture: str | None
    title: str
    detail: str


@dataclass(frozen=True)
class Sheets:
    """Rows to look at; both are empty where no images stage has run."""

    kept: Sequence[Card]
    set_aside: Sequence[Card]


def read_sheets(root: Path) -> Sheets:
    """Kept rows evenly spaced over the dataset, and set-aside rows of all stages with the reasons in turn."""
    images = root / layout.IMAGES
    later = root / layout.PROBLEMS / "quarantine.jsonl"
    try:
        kept = kept_tiles(images, _NUM_TILES) if (images / "problems.jsonl").exists() else []
        more = read_quarantine(later) if later.exists() else []
        has_rows = (images / "quarantine.jsonl").exists()
        aside = set_aside_tiles(images, _NUM_TILES, more) if has_rows else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the report has no contact sheets: %s", error)
        return Sheets((), ())
    return Sheets([_card(tile) for tile in kept], [_card(tile) for tile in aside])


def _card(tile: Tile) -> Card:
    title, _, detail = tile.caption.partition("\n")
    return Card(_small(tile.picture), title, detail.strip())


def _small(path: Path | None) -> str | None:
    if path is None or not path.exists():
        return None
    with Image.open(path) as picture:
        picture.thumbnail((_SIDE, _SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
