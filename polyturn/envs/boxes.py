"""Boxes as models write them: the part of a picture that they name, or in words what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from polyturn.types import ImageRecord, Json

MIN_CROP_SIDE = 16  # pixels; a smaller box is grown to it
MAX_ASPECT_RATIO = 100  # of a crop; Qwen's processors refuse pictures from 200 on
THOUSANDTHS = 1000

Box = tuple[float, float, float, float]  # left, top, right, bottom as fractions of width and height
Unit = Literal["thousandths", "pixels"]


class BoxError(ValueError):
    """No box; its text is shown to the model."""


def read_box(value: Json, unit: Unit, picture: ImageRecord) -> Box:
    """A box [left, top, right, bottom] in thousandths of the picture's sides (Qwen3-VL) or in its pixels (Qwen2.5-VL).

    Raises:
        BoxError: it is no list of four finite numbers with left < right and top < bottom inside the picture,
            or is written in fractions of its sides.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 4:
        raise BoxError("The box must be a list of four numbers.")
    numbers = [n for n in value if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) != 4:
        raise BoxError("The box must be a list of four numbers.")
    in_pixels = unit == "pixels"
    right_edge = picture.width if in_pixels else THOUSANDTHS
    bottom_edge = picture.height if in_pixels else THOUSANDTHS
    left, top, right, bottom = numbers
    # Compared before any arithmetic: NaN fails each comparison, and a long integer fits no float.
    if not (
        all(0 <= n <= right_edge for n in (left, right))
        and all(0 <= n <= bottom_edge for n in (top, bottom))
    ) or _as_fractions(numbers):
        raise BoxError(
            f"The picture goes from 0 to {right_edge} across and from 0 to {bottom_edge} down."
        )
    if not (left < right and top < bottom):
        raise BoxError("left must be less than right, and top less than bottom.")
    return left / right_edge, top / bottom_edge, right / right_edge, bottom / bottom_edge


def _as_fractions(numbers: Sequence[float]) -> bool:
    """Whether a box within 0..1 has parts of one: taken at its word it was the corner, with no sign of an error."""
    return all(0 <= n <= 1 for n in numbers) and any(0 < n < 1 for n in numbers)


def pixel_box(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """The pixels of a box, grown where it is smaller than MIN_CROP_SIDE or too narrow for the model's processor.

    >>> pixel_box((0.5, 0.0, 0.51, 1.0), 200, 100)
    (93, 0, 109, 100)
    """
    columns = (round(box[0] * width), round(box[2] * width))
    rows = (round(box[1] * height), round(box[3] * height))
    least_width = math.ceil((rows[1] - rows[0]) / MAX_ASPECT_RATIO)
    least_height = math.ceil((columns[1] - columns[0]) / MAX_ASPECT_RATIO)
    left, right = _grown(*columns, max(MIN_CROP_SIDE, least_width), width)
    top, bottom = _grown(*rows, max(MIN_CROP_SIDE, least_height), height)
    return left, top, right, bottom


def _grown(start: int, end: int, least: int, size: int) -> tuple[int, int]:
    """The span with at least `least` pixels around the same middle, inside 0..size."""
    if end - start < least:
        start = max(0, min((start + end - least) // 2, size - least))
        end = min(size, start + least)
    return start, end
