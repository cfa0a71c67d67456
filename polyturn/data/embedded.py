"""Pictures that lie in the row itself (bytes, arrays, PIL images) as encoded bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyturn.data.quarantine import RowError


@dataclass(frozen=True)
class Embedded:
    """A picture of the row: a file name inside the dataset, stable from run to run, and encoded bytes."""

    name: str
    data: bytes = field(repr=False)


def embed(value: object, name: str) -> Embedded:
    """Encode a picture; bytes stay as they are, pixels are stored without loss.

    Raises:
        RowError: bad_image, the value is no picture (a stringified one, None, an odd array).
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return Embedded(name, bytes(value))
    if isinstance(value, np.ndarray):
        value = _from_array(cast("npt.NDArray[np.generic]", value))
    if isinstance(value, Image.Image):
        return Embedded(name, _encode(value))
    shown = "" if value is None else f" {str(value)[:40]!r}"
    raise RowError(
        "bad_image",
        "a picture must be URL, path, data URI, bytes, struct, array or PIL image, "
        f"got {type(value).__name__}{shown}",
    )


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    # PNG has no float, CMYK, LAB or HSV pixels; TIFF keeps them.
    kind = "TIFF" if image.mode in ("F", "I", "CMYK", "LAB", "YCbCr", "HSV", "RGBX") else "PNG"
    upright = {"exif": image.getexif()} if image.getexif() else {}
    image.save(buffer, format=kind, **upright)
    return buffer.getvalue()


def _from_array(array: npt.NDArray[np.generic]) -> Image.Image:
    """[H, W], [H, W, C] or [C, H, W] with C in 1, 2, 3, 4; bool, uint8, uint16, other integers or floats."""
    shape = array.shape
    if array.ndim == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 2, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if 0 in shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (2, 3, 4))):
        raise RowError(
            "bad_image", f"an array of shape {shape} is no picture; [H, W] or [H, W, C] is"
        )
    if array.dtype.kind not in "buif":
        raise RowError("bad_image", f"an array of dtype {array.dtype} is no picture")
    if array.dtype == np.uint8 or (array.ndim == 2 and array.dtype == np.uint16):
        return Image.fromarray(np.ascontiguousarray(array))
    if array.dtype == np.bool_:
        return Image.fromarray(array.astype(np.uint8) * np.uint8(255))
    return Image.fromarray(
        scale_to_bytes(array.astype(np.float64), integer=array.dtype.kind in "ui")
    )


def scale_to_bytes(values: npt.NDArray[np.float64], *, integer: bool) -> npt.NDArray[np.uint8]:
    """Scale pixels to 0..255 by their range, never clipping.

    Floats within 0..1 are times 255; whole numbers within 0..255 stay, also as floats; integers within 0..65535 are
    16-bit; anything else is stretched from its smallest to its largest value.

    >>> for values in ([0.0, 0.5, 1.0], [10.0, 128.0, 200.0], [-1.0, 0.0, 1.0]):
    ...     print(scale_to_bytes(np.array(values), integer=False))
    [  0 128 255]
    [ 10 128 200]
    [  0 128 255]

    Raises:
        RowError: not_finite.
    """
    if not np.isfinite(values).all():
        raise RowError("not_finite", "the picture holds NaN or infinite pixels")
    low, high = float(values.min()), float(values.max())
    if not integer and low >= 0 and high <= 1:
        scaled = values * 255
    elif low >= 0 and high <= 255 and bool((values == np.rint(values)).all()):
        scaled = values
    elif integer and low >= 0 and high <= 65535:
        scaled = values / 257
    else:
        scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return np.rint(scaled).astype(np.uint8)
