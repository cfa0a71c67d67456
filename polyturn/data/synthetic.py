"""Drawn geometry problems: one shape, one small label near the centre of one quadrant."""

from __future__ import annotations

import functools
import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from polyturn.data.rows import Embedded
from polyturn.params import SyntheticParams

REGIONS = ("northwest", "northeast", "southwest", "southeast")
KINDS = (
    ("square", "perimeter"),
    ("square", "area"),
    ("triangle", "perimeter"),
    ("circle", "diameter"),
)
_LINE_WIDTH = 4
_JITTER = 8  # pixels, of corners and label
_LABEL_PADDING = 8  # pixels of white around the label


@dataclass(frozen=True)
class Figure:
    """What one picture shows and asks."""

    shape: str
    quantity: str
    label: int
    region: str

    @property
    def answer(self) -> int:
        """4a, a^2, 3a or 2a (the circle's label is its radius)."""
        side = self.label
        if self.shape == "square":
            return 4 * side if self.quantity == "perimeter" else side * side
        return 3 * side if self.shape == "triangle" else 2 * side


def figure_rng(seed: int, split: str, index: int) -> random.Random:
    """The random stream of one row: independent between splits and rows, the same on every machine."""
    digest = hashlib.sha256(f"synthetic/{seed}/{split}/{index}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def draw_figure(rng: random.Random, params: SyntheticParams) -> tuple[Figure, Image.Image]:
    """Draw one figure; the picture is gray (L), `params.image_size` square."""
    shape, quantity = rng.choice(KINDS)
    figure = Figure(
        shape, quantity, rng.randint(params.min_value, params.max_value), rng.choice(REGIONS)
    )
    image = Image.new("L", (params.image_size, params.image_size), 255)
    draw = ImageDraw.Draw(image)
    _draw_shape(draw, rng, shape, params.image_size)
    _draw_label(draw, rng, figure, params)
    return figure, image


def _jitter(rng: random.Random) -> int:
    return rng.randint(-_JITTER, _JITTER)


def _draw_shape(draw: ImageDraw.ImageDraw, rng: random.Random, shape: str, size: int) -> None:
    margin = 20 * size // 256
    near = [margin + _jitter(rng) for _ in range(3)]
    far = [size - margin + _jitter(rng) for _ in range(3)]
    if shape == "triangle":
        top = (size // 2 + _jitter(rng), near[0])
        draw.polygon([top, (near[1], far[0]), (far[1], far[2])], outline=0, width=_LINE_WIDTH)
    elif shape == "square":
        draw.rectangle((near[0], near[1], far[0], far[1]), outline=0, width=_LINE_WIDTH)
    else:
        draw.ellipse((near[0], near[1], far[0], far[1]), outline=0, width=_LINE_WIDTH)


@functools.lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _draw_label(
    draw: ImageDraw.ImageDraw, rng: random.Random, figure: Figure, params: SyntheticParams
) -> None:
    row, column = divmod(REGIONS.index(figure.region), 2)
    quarter, half = params.image_size // 4, params.image_size // 2
    x, y = quarter + column * half + _jitter(rng), quarter + row * half + _jitter(rng)
    text, font = str(figure.label), _font(params.label_size)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    half_width = int(right - left) // 2
    half_height = int(bottom - top) // 2
    pad_x, pad_y = half_width + _LABEL_PADDING, half_height + _LABEL_PADDING
    draw.rectangle((x - pad_x, y - pad_y, x + pad_x, y + pad_y), fill=255)
    draw.text((x - half_width - left, y - half_height - top), text, font=font, fill=0)


@dataclass(frozen=True)
class SyntheticSource:
    """Rows drawn on demand; row i of a split is the same whatever the number of rows."""

    params: SyntheticParams
    seed: int
    counts: dict[str, int]
    base_url: str | None = None
    root: Path | None = None

    def load(self, split: str) -> Iterator[dict[str, object]]:
        """The rows of one split, each with its picture embedded as PNG bytes."""
        for index in range(self.counts[split]):
            figure, image = draw_figure(figure_rng(self.seed, split, index), self.params)
            buffer = io.BytesIO()
            image.save(buffer, format="PNG", compress_level=1)
            yield {
                "id": f"{split}/{index:06d}",
                "problem": f"<image>Find the {figure.quantity}.",
                "answer": figure.answer,
                "images": [Embedded(f"{split}/{index:06d}.png", buffer.getvalue())],
                "shape": figure.shape,
                "quantity": figure.quantity,
                "label": figure.label,
                "region": figure.region,
            }
