"""Contact sheets of an images stage: what was kept, and what was set aside and why."""

from __future__ import annotations

import io
import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont, ImageOps

from polyturn.data.problems import IMAGE_TAG
from polyturn.data.quarantine import SetAside, read_quarantine

_TILE = 160  # side of a picture, pixels
_CAPTION = 62  # height of the text under it
_COLUMNS = 6
_LINE_CHARACTERS = 26


@dataclass(frozen=True)
class Tile:
    """One picture (None: there is none to show) and the text under it."""

    picture: Path | None
    caption: str


def kept_tiles(image_dir: Path, count: int) -> list[Tile]:
    """`count` kept problems, evenly spaced over the dataset, with id and answer; all others are passed over unread."""
    path = image_dir / "problems.jsonl"
    with path.open("rb") as lines:
        num_rows = sum(1 for _ in lines)
    step = max(1, num_rows // max(count, 1))
    with path.open(encoding="utf-8") as lines:
        chosen = list(itertools.islice(itertools.islice(lines, 0, None, step), count))
    return [_kept(json.loads(line), image_dir) for line in chosen]


def _kept(row: Mapping[str, object], image_dir: Path) -> Tile:
    images = cast("Sequence[Mapping[str, str]]", row["images"])
    picture = image_dir / "png" / f"{images[0]['sha256']}.png" if images else None
    prompt = row["problem"]
    if not isinstance(prompt, str):
        prompt = cast("Sequence[Mapping[str, str]]", prompt)[-1]["content"]
    return Tile(picture, f"{row['id']} = {row['answer']}\n{prompt.replace(IMAGE_TAG, '')}")


def set_aside_tiles(image_dir: Path, count: int, more: Sequence[SetAside] = ()) -> list[Tile]:
    """Up to `count` rows set aside, the reasons in turn, with a picture where the store has it.

    `more` are rows that a later stage set aside.
    """
    rows = [*read_quarantine(image_dir / "quarantine.jsonl"), *more]
    rows.sort(key=lambda row: row.reason)
    by_reason = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.reason)]
    in_turn = [row for layer in itertools.zip_longest(*by_reason) for row in layer if row][:count]
    pictures = _pictures(image_dir, {row.id for row in in_turn})
    return [Tile(pictures.get(row.id), f"{row.id}: {row.reason}\n{row.detail}") for row in in_turn]


def _pictures(image_dir: Path, ids: set[str]) -> dict[str, Path]:
    """The first stored picture of each row."""
    found: dict[str, Path] = {}
    manifest = image_dir / "manifest.parquet"
    if not ids or not manifest.exists():
        return found
    with pq.ParquetFile(manifest) as file:
        for batch in file.iter_batches(columns=["row_id", "png_sha256"]):
            for name, sha256 in zip(*batch.to_pydict().values(), strict=True):
                path = image_dir / "png" / f"{sha256}.png"
                if name in ids and sha256 and path.is_file():
                    found.setdefault(str(name), path)
    return found


def draw_sheet(tiles: Sequence[Tile]) -> bytes:
    """All tiles in rows of six, as PNG bytes; a single line of text if there is none."""
    num_rows = max(1, -(-len(tiles) // _COLUMNS))
    sheet = Image.new("RGB", (_COLUMNS * (_TILE + 8), num_rows * (_TILE + _CAPTION + 8)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    if not tiles:
        draw.text((8, 8), "nothing to show", font=font, fill="black")
    for index, tile in enumerate(tiles):
        row, column = divmod(index, _COLUMNS)
        x, y = column * (_TILE + 8) + 4, row * (_TILE + _CAPTION + 8) + 4
        draw.rectangle((x - 1, y - 1, x + _TILE, y + _TILE), outline="lightgray")
        if tile.picture is None:
            draw.text((x + 8, y + _TILE // 2), "no picture", font=font, fill="gray")
        else:
            with Image.open(tile.picture) as picture:
                sheet.paste(ImageOps.pad(picture, (_TILE, _TILE), color="white"), (x, y))
        draw.text((x, y + _TILE + 3), _wrapped(tile.caption.splitlines()), font=font, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _wrapped(lines: Iterable[str]) -> str:
    wrapped = [part for line in lines for part in textwrap.wrap(line, _LINE_CHARACTERS)]
    return "\n".join(wrapped[:4])
