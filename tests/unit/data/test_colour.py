"""Colour profiles: what a picture shows in every viewer is what is stored (kinds of IMG-07 for colours)."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms

from polyturn.data.normalise import normalise
from polyturn.envs.base import image_record
from polyturn.params import ImagesParams

SMALL = ImagesParams(size_multiple=1, min_side=1)
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# Display P3, columns of its matrix to XYZ at D50 (ICC profiles are relative to it).
_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _profile(space: bytes) -> bytes:
    """A matrix profile with P3's primaries and a gamma of 2.2; `space` is what its header says it is for."""

    tags = {
        name: b"XYZ \0\0\0\0" + b"".join(map(_fixed, column))
        for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), _P3, strict=True)
    }
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + b"\0\0"
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    return _file(tags, b"mntr" + space + b"XYZ ")


def _print_profile() -> bytes:
    """A profile for CMYK in which cyan, magenta and yellow take a sixth of the lightness each, and black all of it."""
    inks = itertools.product((0, 1), repeat=4)
    lightness = [round(255 * (1 - (c + m + y) / 6) * (1 - k)) for c, m, y, k in inks]
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0])
    table += b"".join(_fixed(number) for number in (1, 0, 0, 0, 1, 0, 0, 0, 1))
    table += bytes(range(256)) * 4
    table += b"".join(bytes([level, 128, 128]) for level in lightness)  # L, a, b: gray
    return _file({b"A2B0": table + bytes(range(256)) * 3}, b"prtrCMYKLab ")


def _file(tags: dict[bytes, bytes], kind: bytes) -> bytes:
    """An ICC file of tags; `kind` is class, colour space and space of the connection."""
    white = b"".join(map(_fixed, (0.9642, 1.0, 0.8249)))
    tags = {b"wtpt": b"XYZ \0\0\0\0" + white} | {
        name: value + b"\0" * (-len(value) % 4) for name, value in tags.items()
    }
    offset, table, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", offset + len(body), len(value))
        body += value
    size = offset + len(body)
    head = struct.pack(">I4sI", size, b"\0" * 4, 0x02400000) + kind
    head += b"\0" * 12 + b"acsp" + b"\0" * 28 + white
    return head.ljust(128, b"\0") + table + body


WIDE = _profile(b"RGB ")


def _stored(image: Image.Image, kind: str, profile: bytes | None) -> np.ndarray:
    buffer = io.BytesIO()
    options = {} if profile is None else {"icc_profile": profile}
    image.save(buffer, kind, lossless=True, quality=100, **options)
    return np.asarray(Image.open(io.BytesIO(normalise(buffer.getvalue(), SMALL).png)))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_colours_of_a_wide_profile_are_shown_as_what_they_are(kind: str) -> None:
    """cgwire/zou#1188, thumbor/thumbor#586: read as sRGB, colours of Display P3 come out pale."""
    image = Image.new("RGB", (8, 8), (200, 100, 100))
    red, green, blue = (int(level) for level in _stored(image, kind, WIDE)[0, 0])
    # By hand: linear (200, 100, 100)/255 to the power 2.2 is (.586, .128, .128); through P3 -> sRGB
    # ((1.2249, -.2247, 0), (-.0420, 1.0419, 0), (-.0197, -.0786, 1.0979)): (.689, .109, .119), encoded (216, 93, 97).
    assert (abs(red - 216) <= 3, abs(green - 93) <= 3, abs(blue - 97) <= 3) == (True, True, True)
    white = _stored(Image.new("RGB", (8, 8), (255, 255, 255)), kind, WIDE)
    assert (white >= 254).all()


@pytest.mark.parametrize(
    "profile",
    [_SRGB, b"no profile", WIDE[:200], _profile(b"CMYK"), _profile(b"GRAY")],
    ids=["sRGB", "garbage", "cut", "for CMYK", "for gray"],
)
def test_pictures_in_srgb_and_profiles_that_say_nothing_keep_their_pixels(profile: bytes) -> None:
    """pbs/its#180."""
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for image in (Image.fromarray(noise), Image.fromarray(noise).convert("L")):
        plain = _stored(image, "PNG", None)
        assert (_stored(image, "PNG", profile) == plain).all()


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_print_colours_are_shown_as_they_print(kind: str) -> None:
    """cgwire/zou#1188: CMYK without its profile is far too bright. A sixth less lightness than white is L* = 83,
    of which Y = ((83 + 16) / 116) ** 3 = 0.62, in sRGB 0.81 of 255."""
    colours = {(0, 0, 0, 0): (255,) * 3, (255, 0, 0, 0): (207,) * 3, (0, 0, 0, 255): (0,) * 3}
    for inks, expected in colours.items():
        image = Image.new("CMYK", (16, 16), inks)
        shown = _stored(image, kind, _print_profile())[8, 8].astype(int)
        assert np.abs(shown - expected).max() <= 3, (inks, shown)
    assert tuple(_stored(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), kind, None)[8, 8]) == (
        0,
        255,
        255,
    )


def test_transparent_pixels_are_white_under_a_profile_too() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((200, 100, 100, 255), (4, 0, 8, 8))
    pixels = _stored(image, "PNG", WIDE)
    assert (pixels[:, :4] >= 254).all()
    assert abs(int(pixels[0, 6, 0]) - 216) <= 3


def test_a_file_that_an_environment_shows_is_turned_and_in_srgb_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), (200, 100, 100)).save(buffer, "PNG", exif=exif, icc_profile=WIDE)
    record = image_record(buffer.getvalue())
    assert (record.width, record.height) == (4, 8)
    assert record.data is not None
    assert abs(Image.open(io.BytesIO(record.data)).convert("RGB").getpixel((0, 0))[0] - 216) <= 3
