"""Fetched bytes -> one upright RGB picture on white (cases IMG-01 to IMG-17, IMG-33 and their kinds)."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from polyturn.data.normalise import NormalisedImage, final_size, normalise, sniff
from polyturn.data.quarantine import RowError
from polyturn.params import ImagesParams

SMALL = ImagesParams(size_multiple=1, min_side=1)
RED, GREEN, WHITE, BLACK = (255, 0, 0), (0, 128, 0), (255, 255, 255), (0, 0, 0)


def _save(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _pixels(stored: NormalisedImage) -> Image.Image:
    image = Image.open(io.BytesIO(stored.png))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (stored.width, stored.height))
    return image


def _noise(size: tuple[int, int] = (200, 200)) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def _reason(data: bytes, limits: ImagesParams = SMALL) -> str:
    with pytest.raises(RowError) as error:
        normalise(data, limits)
    return error.value.reason


@pytest.mark.parametrize("size", [(2300, 10), (10, 2300), (4001, 20)])
def test_a_very_thin_picture_is_named_by_its_ratio(size: tuple[int, int]) -> None:
    """IMG-01."""
    assert _reason(_save(Image.new("RGB", size)), ImagesParams()) == "aspect_ratio"


@pytest.mark.parametrize(
    ("size", "multiple", "max_pixels", "expected"),
    [
        ((30, 700), 28, 15 * 28 * 28, (28, 420)),
        ((700, 30), 28, 15 * 28 * 28, (420, 28)),
        ((35, 800), 32, 20 * 32 * 32, (32, 640)),
        ((472, 264), 32, 10**6, (480, 256)),
        ((1, 1), 16, 10**6, (16, 16)),
        ((2000, 1000), 16, 500_000, (992, 496)),
    ],
)
def test_final_size_by_hand(
    size: tuple[int, int], multiple: int, max_pixels: int, expected: tuple[int, int]
) -> None:
    """IMG-03."""
    assert (
        final_size(*size, ImagesParams(size_multiple=multiple, max_pixels=max_pixels)) == expected
    )


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, 14, 16, 28, 32]),
    st.integers(1, 60),
)
@settings(max_examples=300, deadline=None)
def test_final_size_is_a_positive_multiple_within_the_limit(
    width: int, height: int, multiple: int, blocks: int
) -> None:
    limits = ImagesParams(size_multiple=multiple, max_pixels=blocks * multiple**2)
    sides = final_size(width, height, limits)
    assert all(side >= multiple and side % multiple == 0 for side in sides)
    assert sides[0] * sides[1] <= limits.max_pixels


@pytest.mark.parametrize(
    ("size", "is_kept"), [((1, 1), False), ((16, 16), False), ((28, 28), True), ((500, 27), False)]
)
def test_min_side_sets_small_pictures_aside(size: tuple[int, int], is_kept: bool) -> None:
    """IMG-06."""
    limits = ImagesParams(min_side=28, size_multiple=28)
    data = _save(Image.new("RGB", size, RED))
    if is_kept:
        assert normalise(data, limits).width == 28
    else:
        assert _reason(data, limits) == "too_small"


def _bars() -> Image.Image:
    """64 x 48: red bar on the left edge, green bar on the bottom."""
    image = Image.new("RGB", (64, 48), WHITE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 7, 47), fill=RED)
    draw.rectangle((8, 40, 63, 47), fill=GREEN)
    return image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_rotation_is_applied_in_every_format(kind: str) -> None:
    """IMG-07: orientation 6 puts red on top and green on the left."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"lossless": True} if kind == "WEBP" else {}
    stored = normalise(_save(_bars(), kind, exif=exif, **options), SMALL)
    image = _pixels(stored)
    assert image.size == (48, 64)
    for point, colour in (((44, 3), RED), ((3, 40), GREEN), ((30, 40), WHITE)):
        assert np.allclose(image.getpixel(point), colour, atol=12)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_show_the_same_upright_picture(orientation: int) -> None:
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    lying = _bars() if undo is None else _bars().transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = normalise(_save(lying, exif=exif), SMALL)
    assert stored.sha256 == normalise(_save(_bars()), SMALL).sha256


def test_hidden_colour_under_transparency_becomes_white() -> None:
    """IMG-09."""
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    ImageDraw.Draw(image).line((4, 16, 28, 16), fill=(0, 0, 0, 255), width=2)
    pixels = np.asarray(_pixels(normalise(_save(image), SMALL)))
    assert (pixels[0] == 255).all()
    assert (pixels[16, 10] == 0).all()
    assert set(np.unique(pixels)) == {0, 255}


def _transparent(mode: str) -> bytes:
    """40 x 40: left half transparent over black, right half opaque gray 128."""
    if mode in ("RGBA", "LA"):
        image = Image.new(mode, (40, 40), (0,) * len(mode))
        image.paste((128,) * (len(mode) - 1) + (255,), (20, 0, 40, 40))
        return _save(image)
    if mode == "P":
        image = Image.new("P", (40, 40), 0)
        image.putpalette([0, 0, 0, 128, 128, 128])
        image.paste(1, (20, 0, 40, 40))
        return _save(image, transparency=0)
    image = Image.new(mode, (40, 40), 0)
    image.paste((128, 128, 128) if mode == "RGB" else 128, (20, 0, 40, 40))
    return _save(image, transparency=(0, 0, 0) if mode == "RGB" else 0)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "LA"])
def test_every_form_of_transparency_is_composited_alike(mode: str) -> None:
    """IMG-10."""
    expected = normalise(_transparent("RGBA"), SMALL)
    assert normalise(_transparent(mode), SMALL).sha256 == expected.sha256
    pixels = np.asarray(_pixels(expected))
    assert (pixels[:, :20] == 255).all()
    assert (pixels[:, 20:] == 128).all()


def test_palette_with_graded_alpha_is_blended() -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([0, 0, 0])
    data = _save(image, transparency=bytes([128]))
    assert _pixels(normalise(data, SMALL)).getpixel((0, 0)) == (127, 127, 127)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    """IMG-12."""
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    pixels = np.asarray(_pixels(normalise(_save(Image.fromarray(ramp)), SMALL)))[:, :, 0]
    assert (np.diff(pixels.astype(int).ravel()) >= 0).all()
    assert abs(pixels.mean() - 127.5) < 0.5
    assert (pixels == 255).mean() < 0.01


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(0, 1, 4096, dtype=np.float32),
        np.linspace(-3, 7, 4096, dtype=np.float32),
        np.linspace(0, 65535, 4096).astype(np.int32),
        np.linspace(-(2**30), 2**30, 4096).astype(np.int32),
    ],
)
def test_float_and_long_integer_pixels_use_their_whole_range(values: np.ndarray) -> None:
    data = _save(Image.fromarray(values.reshape(64, 64)), "TIFF")
    pixels = np.asarray(_pixels(normalise(data, SMALL)))[:, :, 0]
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert (np.diff(pixels.astype(int).ravel()) >= 0).all()
    assert abs(pixels.mean() - 127.5) < 1


def test_a_picture_with_nan_is_set_aside() -> None:
    values = np.full((20, 20), np.nan, np.float32)
    assert _reason(_save(Image.fromarray(values), "TIFF")) == "not_finite"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_modes_without_transparency_become_the_same_black_and_white(mode: str) -> None:
    image = Image.new("RGB", (32, 32), WHITE)
    ImageDraw.Draw(image).rectangle((8, 8, 23, 23), fill=BLACK)
    kind = {"CMYK": "TIFF", "YCbCr": "TIFF"}.get(mode, "PNG")
    stored = normalise(_save(image.convert(mode), kind), SMALL)
    assert stored.source.mode == mode
    assert (np.asarray(_pixels(stored)) == np.asarray(image)).all()


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("JPEG", 0.5),
        ("JPEG", -2),
        ("PNG", 0.5),
        ("PNG", -12),
        ("PNG", -2),
        ("WEBP", 0.5),
        ("WEBP", -2),
        ("GIF", 0.5),
        ("BMP", 0.5),
        ("TIFF", 0.5),
    ],
)
def test_a_cut_file_is_never_completed_with_gray(kind: str, cut: float) -> None:
    """IMG-15."""
    data = _save(_noise(), kind)
    cut_at = int(len(data) * cut) if isinstance(cut, float) else cut
    assert normalise(data, SMALL).width == 200
    assert _reason(data[:cut_at]) in ("truncated", "corrupt")
    if kind in ("JPEG", "PNG", "WEBP"):
        assert _reason(data[:cut_at]) == "truncated"


@pytest.mark.parametrize("is_progressive", [False, True])
def test_a_jpeg_is_whole_whatever_follows_it(is_progressive: bool) -> None:
    """3rd/image.nvim#379 and libjxl#3502: phones put a film behind the picture."""
    thumbnail = Image.Exif()
    thumbnail[0x9286] = _save(_noise((16, 16)), "JPEG").hex()  # a comment as long as one
    data = _save(_noise(), "JPEG", progressive=is_progressive, exif=thumbnail)
    for trailer in (
        b"\0" * 7,
        b"\0\0\0\x18ftypmp42" + b"\xff\xda\0" * 9,
        b"\xff\xd8\xff\xda",
        data[:999],
    ):
        assert normalise(data + trailer, SMALL).width == 200
    assert _reason(data[:-2]) == "truncated"
    assert _reason(data[: len(data) // 2]) == "truncated"


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"restart_marker_rows": 1}, {"quality": 100}],
)  # fmt: skip
@pytest.mark.parametrize("cut", [0.3, 0.5, 0.8, 0.99])
def test_a_cut_jpeg_with_an_end_marker_put_behind_it_is_truncated(
    options: dict[str, object], cut: float
) -> None:
    """brendan-duncan/image#230, python-pillow/Pillow#3023: decoders complete it with gray and say nothing."""
    data = _save(_noise(), "JPEG", **options)
    assert normalise(data, SMALL).width == 200
    assert _reason(data[: int(len(data) * cut)] + b"\xff\xd9") == "truncated"


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(1, 1), (9, 23), (64, 48)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_a_whole_jpeg_is_never_taken_for_a_cut_one(
    mode: str, size: tuple[int, int], options: dict[str, object]
) -> None:
    for image in (_noise(size), Image.new("RGB", size, WHITE)):
        data = _save(image.convert(mode), "JPEG", **options)
        assert (normalise(data, SMALL).width, normalise(data, SMALL).height) == size


def test_several_pictures_in_one_jpeg_file_are_whole() -> None:
    stored = normalise(_save(_noise(), "MPO", save_all=True, append_images=[_noise()]), SMALL)
    assert stored.source.num_frames == 2


def _tiff_header(tags: list[tuple[int, int, int, bytes]]) -> bytes:
    """EXIF of tags (number, type, count, value); longer values stand behind them."""
    values, end = b"", 8 + 2 + 12 * len(tags) + 4
    body = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags))
    for number, kind, count, value in tags:
        field = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", end + len(values))
        values += value if len(value) > 4 else b""
        body += struct.pack("<HHI", number, kind, count) + field
    return body + struct.pack("<I", 0) + values


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "damaged",
    [
        (0x011A, 5, 1, struct.pack("<II", 0, 0)),  # a resolution of 0 / 0
        (0x011A, 2, 3, b"72\0"),  # a resolution in letters
        (0x010F, 2, 5000, struct.pack("<I", 99999)),  # a name of 5000 letters outside of the file
        (0x8769, 2, 4, b"abc\0"),
        (0x8769, 4, 1, struct.pack("<I", 8)),  # a directory that contains itself
    ],
)
def test_a_damaged_tag_does_not_keep_a_picture_lying(
    damaged: tuple[int, int, int, bytes],
) -> None:
    """python-pillow/Pillow#8605, huggingface/datasets#7668: the orientation stands beside it and can be read."""
    exif = _tiff_header([(0x0112, 3, 1, struct.pack("<H", 6)), damaged])
    stored = normalise(_save(_bars(), "JPEG", exif=exif), SMALL)
    assert (stored.width, stored.height) == (48, 64)
    assert np.allclose(_pixels(stored).getpixel((44, 3)), RED, atol=12)


@pytest.mark.parametrize("value", [b"\0\0", b"\x09\0", b"\xff\xff"])
def test_an_orientation_that_is_none_turns_nothing(value: bytes) -> None:
    exif = _tiff_header([(0x0112, 3, 1, value)])
    assert normalise(_save(_bars(), "JPEG", exif=exif), SMALL).width == 64


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"P3\n# by hand\n2 1\n255\n255 0 0 255 0 0\n", "PPM"),
        (b"P6 2 1 255\n" + bytes(RED) * 2, "PPM"),
        (_save(Image.new("RGB", (2, 1), RED), "TIFF", big_tiff=True), "TIFF"),
        (_save(Image.new("RGB", (2, 1), RED), "AVIF", quality=100).replace(b"ftypavif", b"ftypmif1", 1), "AVIF"),
    ],
)  # fmt: skip
def test_every_form_of_a_format_that_pillow_reads_is_known(data: bytes, kind: str) -> None:
    """fdintino/pillow-avif-plugin#5: AVIF by its compatible brands; and ASCII PPM, BigTIFF."""
    assert sniff(data) == kind
    assert normalise(data, SMALL).width == 2


def _bomb(side: int) -> bytes:
    """A 1-bit PNG of side x side zeros, as a few KB."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    packer = zlib.compressobj(9)
    row = b"\0" * (1 + (side + 7) // 8)
    body = b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    """IMG-17."""
    data = _bomb(side)
    assert len(data) < 120_000
    tracemalloc.start()
    assert _reason(data) == "too_many_pixels"
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame_and_counts_them(kind: str) -> None:
    """IMG-33."""
    first, second = (Image.new("RGB", (32, 32), colour) for colour in (RED, (0, 0, 255)))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = _save(first, kind, save_all=True, append_images=[second], duration=100, **options)
    stored = normalise(data, SMALL)
    assert stored.source.num_frames == 2
    assert stored.sha256 == normalise(_save(first), SMALL).sha256


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"<!DOCTYPE html><html>", "html"),
        (b"\n  <html lang=en>", "html"),
        (b'<?xml version="1.0"?><svg xmlns="x">', "svg"),
        (b"<svg/>", "svg"),
        (b'{"error": "no"}', "json"),
        (b"%PDF-1.7", "text"),
        (b"hello", "text"),
        (b"P5 is a promise", "text"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heic"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "unknown"),
        (b"\x00\x01\x02\x03", "unknown"),
    ],
)
def test_what_is_no_raster_image_is_named_by_its_content(data: bytes, kind: str) -> None:
    assert sniff(data) == kind
    assert _reason(data) == "not_an_image"


def test_an_empty_body_and_a_damaged_header_have_reasons_of_their_own() -> None:
    assert _reason(b"") == "empty_body"
    assert _reason(b"\x89PNG\r\n\x1a\n" + b"\0" * 50 + b"IEND\xaeB`\x82") == "corrupt"
    assert _reason(b"BM" + b"\0" * 60) == "corrupt"


@pytest.mark.filterwarnings("ignore")
@given(st.binary(max_size=300), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
@settings(max_examples=200, deadline=None)
def test_no_bytes_raise_anything_but_a_reason(noise: bytes, kind: str) -> None:
    data = bytearray(_save(_bars(), kind))
    start = len(noise) % 40
    data[start : start + len(noise)] = noise
    with contextlib.suppress(RowError):
        normalise(bytes(data), SMALL)


def test_png_bytes_depend_on_pixels_alone() -> None:
    from PIL.PngImagePlugin import PngInfo  # noqa: PLC0415

    note = PngInfo()
    note.add_text("Author", "someone")
    plain = normalise(_save(_bars()), SMALL)
    noted = normalise(_save(_bars(), pnginfo=note, dpi=(300, 300), compress_level=1), SMALL)
    assert plain.png == noted.png
