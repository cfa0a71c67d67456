"""Fetched bytes -> one upright RGB picture on white, as deterministic PNG bytes."""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from polyturn.data import jpeg
from polyturn.data.colour import to_srgb
from polyturn.data.embedded import scale_to_bytes
from polyturn.data.quarantine import RowError

if TYPE_CHECKING:
    from polyturn.params import ImagesParams

_log = logging.getLogger(__name__)
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM")
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
)
_PPM = re.compile(rb"P[1-6]\s(?:\s|#.*\n)*\d")
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by EXIF orientation
_PNG_LEVEL = 3  # on line drawings as small as 6 (geo3k: 16.1 and 17.2 KB), a third faster


@dataclass(frozen=True)
class SourceInfo:
    """What the fetched bytes are: format, Pillow mode, size before turning upright, number of frames."""

    format: str
    mode: str
    width: int
    height: int
    num_frames: int


@dataclass(frozen=True)
class NormalisedImage:
    """The stored picture: PNG bytes, their sha256, final size, and what they were made of."""

    png: bytes = field(repr=False)
    sha256: str
    width: int
    height: int
    source: SourceInfo


def sniff(data: bytes) -> str:
    """Name the kind of content by its first bytes: a Pillow format, or heic, html, svg, json, text, empty, unknown."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        brands = data[
            8 : min(int.from_bytes(data[:4], "big"), 256)
        ]  # the first, and those it is compatible with
        if b"avif" in brands or b"avis" in brands:
            return "AVIF"
        return "heic" if b"hei" in brands or b"mif1" in brands else "unknown"
    if _PPM.match(data[:256]):
        return "PPM"
    return _sniff_text(data[:1024])


def _sniff_text(start: bytes) -> str:
    if not start:
        return "empty"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text:
        return "svg"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "html"
    if text.startswith((b"{", b"[")):
        return "json"
    is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in start)
    return "text" if is_text else "unknown"


def check_raster(data: bytes) -> str:
    """The Pillow format of the content.

    Raises:
        RowError: not_an_image, whatever a header or file name says; empty_body.
    """
    kind = sniff(data)
    if kind == "empty":
        raise RowError("empty_body", "the body has 0 bytes")
    if kind not in FORMATS:
        raise RowError("not_an_image", f"content is {kind}, not one of {', '.join(FORMATS)}")
    return kind


def normalise(data: bytes, limits: ImagesParams) -> NormalisedImage:
    """Decode, turn upright, put on white, scale to the allowed size, encode.

    Raises:
        RowError: see "Reasons of a picture" in quarantine.py.
    """
    kind = check_raster(data)
    _check_complete(data, kind)
    try:
        image = Image.open(io.BytesIO(data), formats=(kind,))
        info = _inspect(image, kind, limits)
        image.load()
        if kind == "JPEG" and jpeg.is_cut(data, image):
            raise RowError("truncated", f"JPEG of {len(data)} bytes ends before its last pixels")
        rgb = as_shown(image)
    except RowError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        raise RowError("too_many_pixels", str(error)) from None
    except UnidentifiedImageError:
        raise RowError("corrupt", f"starts like {kind} and cannot be read as such") from None
    except Exception as error:  # the boundary where a bad picture becomes data
        _log.debug("%s of %d bytes cannot be decoded", kind, len(data), exc_info=True)
        reason = "truncated" if "truncated" in str(error).lower() else "corrupt"
        raise RowError(reason, f"{kind}: {error}") from None
    width, height = final_size(*rgb.size, limits)
    if (width, height) != rgb.size:
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    png = encode_png(rgb)
    return NormalisedImage(png, hashlib.sha256(png).hexdigest(), width, height, info)


def encode_png(rgb: Image.Image) -> bytes:
    """PNG bytes that depend on the pixels alone: no metadata, fixed compression."""
    bare = Image.frombytes("RGB", rgb.size, rgb.tobytes()) if rgb.info else rgb
    buffer = io.BytesIO()
    bare.save(buffer, format="PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


def final_size(width: int, height: int, limits: ImagesParams) -> tuple[int, int]:
    """Sides rounded to multiples of images.size_multiple, scaled down to images.max_pixels, never 0.

    30 x 700 with multiple 28 and 15 * 28 * 28 pixels gives 28 x 420.
    """
    unit, limit = limits.size_multiple, limits.max_pixels
    wide, high = (max(unit, round(side / unit) * unit) for side in (width, height))
    if wide * high > limit:
        shrink = math.sqrt(limit / (width * height))
        wide, high = (
            max(unit, math.floor(side * shrink / unit) * unit) for side in (width, height)
        )
    # A side that was held at one unit leaves the other too long.
    if wide * high > limit:
        longest = max(unit, limit // unit // unit * unit)
        wide, high = min(wide, longest), min(high, longest)
    return wide, high


def as_shown(image: Image.Image) -> Image.Image:
    """The picture of an opened file as viewers show it: upright, in sRGB, on white.

    Raises:
        RowError: as `to_rgb`.
    """
    profile = cast("bytes | None", image.info.get("icc_profile"))
    upright = _upright(image)
    if image.mode == "CMYK":
        return to_rgb(to_srgb(upright, profile))
    return to_srgb(to_rgb(upright), profile)


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB on white: alpha and tRNS composited, 16-bit and float pixels scaled by their range, CMYK converted.

    Raises:
        RowError: not_finite, unsupported_mode.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _from_deep(image)
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    if image.mode == "RGB":
        return image
    try:
        return image.convert("RGB")
    except ValueError:
        raise RowError(
            "unsupported_mode", f"pixels of mode {image.mode} have no RGB form here"
        ) from None


def _from_deep(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    if image.mode.startswith("I;16"):
        gray = np.rint(values / 257).astype(np.uint8)
    else:
        gray = scale_to_bytes(values, integer=image.mode == "I")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return Image.fromarray(gray).convert("RGB")


def _inspect(image: Image.Image, kind: str, limits: ImagesParams) -> SourceInfo:
    """Check the header's size before anything is decoded; first frame of an animation."""
    width, height = image.size
    if width < 1 or height < 1:
        raise RowError("corrupt", f"header says {width} x {height} pixels")
    if width * height > limits.max_input_pixels:
        raise RowError(
            "too_many_pixels",
            f"{width} x {height} pixels, images.max_input_pixels is {limits.max_input_pixels}",
        )
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_aspect_ratio:
        raise RowError(
            "aspect_ratio",
            f"{width} x {height} has ratio {ratio:.1f}, images.max_aspect_ratio is {limits.max_aspect_ratio:g}",
        )
    if min(width, height) < limits.min_side:
        raise RowError("too_small", f"{width} x {height}, images.min_side is {limits.min_side}")
    mode = image.mode
    num_frames = int(cast("int", getattr(image, "n_frames", 1)))
    if num_frames > 1:
        image.seek(0)
    return SourceInfo(kind, mode, width, height, num_frames)


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF or XMP says; other tags may be damaged (ImageOps.exif_transpose fails on them)."""
    try:
        turn = _TO_UPRIGHT.get(cast("int", image.getexif().get(ExifTags.Base.Orientation)))
    except Exception:  # damaged EXIF says nothing about orientation, and raises anything
        return image
    return image if turn is None else image.transpose(turn)


def _check_complete(data: bytes, kind: str) -> None:
    """Refuse files without their end marker, which decoders complete with gray or garbage."""
    if kind == "JPEG":
        is_whole = jpeg.end_of_picture(data) is not None
    elif kind == "PNG":
        is_whole = b"IEND\xaeB`\x82" in data
    elif kind == "WEBP":
        is_whole = len(data) >= int.from_bytes(data[4:8], "little") + 8
    elif kind == "GIF":
        is_whole = b"\x3b" in data[-1024:]
    else:
        is_whole = True
    if not is_whole:
        raise RowError("truncated", f"{kind} of {len(data)} bytes ends before its end marker")
