"""Whether a JPEG holds its whole picture; decoders fill what is missing with gray and say nothing."""

from __future__ import annotations

import io
import re

from PIL import Image

# A marker: not a stuffed byte, a restart or a fill byte.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_BARE_MARKERS = (0x01, 0xD8)  # have no segment behind them
_END_OF_IMAGE = 0xD9
_STRIP = 256  # rows that are compared at a time, so that no picture is held four times
_NOISE = bytes((37 * i + 11) % 251 for i in range(256))
# Picture data that only a decoder reads which is not done yet: noise, and noise after each restart marker.
_MORE = _NOISE + b"".join(bytes([0xFF, restart]) + _NOISE for restart in range(0xD0, 0xD8))


def end_of_picture(data: bytes) -> int | None:
    """Where the end marker of the first picture starts; what follows it (a film, a second picture) is free."""
    at = 2
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker == _END_OF_IMAGE:
            return found.start()
        if marker not in _BARE_MARKERS:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return None


def is_cut(data: bytes, decoded: Image.Image) -> bool:
    """Whether the end marker comes before the picture is complete; `decoded` is how `data` was decoded.

    A decoder that has read its last block skips what stands between it and the end marker. So more picture data
    put there changes pixels exactly where some were missing.
    """
    end = end_of_picture(data)
    if end is None:
        return True
    longer = Image.open(io.BytesIO(data[:end] + _MORE + data[end:]), formats=("JPEG",))
    try:
        longer.load()
    except OSError:  # the decoder went on, and into noise
        return True
    width, height = decoded.size
    strips = ((0, top, width, min(top + _STRIP, height)) for top in range(0, height, _STRIP))
    return any(longer.crop(strip).tobytes() != decoded.crop(strip).tobytes() for strip in strips)
