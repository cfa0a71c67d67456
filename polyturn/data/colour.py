"""Pictures with a colour profile of their own -> sRGB, as every viewer shows them and models are shown colours.

Pillow's own conversion takes all numbers for sRGB: those of a phone's Display P3 come out pale, those of a print's CMYK
far too bright. A picture whose profile is sRGB, or says so of its own accord under another name, keeps its pixels.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image, ImageCms

if TYPE_CHECKING:
    from PIL._imagingcms import CmsProfile

_SAME = 4  # of 255: profiles are one that differ by no more; forms of sRGB differ by 1, others by 50 and more
_SPACES = {"RGB": "RGB ", "CMYK": "CMYK"}  # of a picture, and of a profile that is for it


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """An RGB or CMYK picture as sRGB; unchanged if `profile` (ICC) is none, sRGB, damaged or for other pixels."""
    if not profile or image.mode not in _SPACES:
        return image
    transform = _transform(profile, image.mode)
    return image if transform is None else ImageCms.applyTransform(image, transform) or image


@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if cast("CmsProfile", source.profile).xcolor_space != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return None
    return None if mode == "RGB" and _keeps_colours(transform) else transform


def _keeps_colours(transform: ImageCms.ImageCmsTransform) -> bool:
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(27, 27, 3)
    shown = ImageCms.applyTransform(Image.fromarray(colours), transform)
    return bool(np.abs(np.asarray(shown).astype(int) - colours).max() <= _SAME)
