"""Dataset rows as they are in the world -> `Row`, or a named reason; nothing is guessed silently."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import cast

import numpy as np

from polyturn.data.embedded import Embedded, embed
from polyturn.data.normalise import FORMATS, sniff
from polyturn.data.quarantine import RowError
from polyturn.data.urls import decode_data_uri
from polyturn.params import DataParams
from polyturn.types import Json

IMAGE_TAG = "<image>"
_RENDERED_IMAGE = (
    "<|vision_start|><|image_pad|><|vision_end|>"  # a tag as Qwen's templates write it
)
_IMAGE_COLUMNS = ("image", "images", "img", "picture", "pictures")
ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_PICTURE_KEYS = ("image", "image_url", "url", "path", "bytes")
ImageSource = (
    str | Embedded
)  # a URL, data URI or path as written in the dataset; or the picture itself
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]{64,}")  # the smallest PNG has 90 characters
Turns = tuple[tuple[str, str], ...]  # (role, text with <image> tags)


@dataclass(frozen=True)
class Row:
    """One parsed dataset row; the tags in `problem` are as many as `images`."""

    id: str
    split: str
    problem: str | Turns
    answer: str
    images: tuple[ImageSource, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict)
    is_tag_added: bool = False


def plain(value: object) -> object:
    """Arrow scalars, numpy scalars and object arrays, tuples -> plain Python; numeric arrays stay (pictures)."""
    if hasattr(value, "as_py"):
        value = cast("Callable[[], object]", value.as_py)()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = cast("list[object]", value.tolist())
    if isinstance(value, np.generic):
        value = cast("object", value.item())
    if isinstance(value, tuple):
        value = list(cast("tuple[object, ...]", value))
    return value


def parse_row(
    raw: object, *, split: str, index: int, params: DataParams, parse_answer: Callable[[str], str]
) -> Row:
    """Parse row `index` of a split.

    Raises:
        RowError: the row is malformed; reason and detail say how (see quarantine.py).
    """
    raw = plain(raw)
    if not isinstance(raw, Mapping):
        raise RowError("bad_row", f"a row must be a mapping of columns, got {type(raw).__name__}")
    row = cast("Mapping[str, object]", raw)
    images: list[ImageSource] = []
    given = _column(row, params.images_key)
    if given is not None:
        images = _image_list(given, f"embedded/{split}/{index:06d}")
    turns, images = _prompt(row, params, images, f"embedded/{split}/{index:06d}")
    if not images:
        _check_unnamed(row, params)
    turns, is_tag_added = _check_tags(turns, len(images), add_tag=params.add_image_tag)
    used = {"id", "split", params.problem_key, params.images_key, params.answer_key}
    return Row(
        id=row_id(row, split, index),
        split=split,
        problem=turns[0][1] if len(turns) == 1 and turns[0][0] == "user" else turns,
        answer=_answer(row, params.answer_key, parse_answer),
        images=tuple(images),
        metadata={key: _json(plain(value)) for key, value in row.items() if key not in used},
        is_tag_added=is_tag_added,
    )


def _column(row: Mapping[str, object], key: str) -> object:
    """A column, or with a.b the field b of the struct in column a; None where there is none."""
    value: object = row
    for name in [key] if key in row else key.split("."):
        value = (
            plain(cast("Mapping[str, object]", value).get(name))
            if isinstance(value, Mapping)
            else None
        )
    return value


def _check_unnamed(row: Mapping[str, object], params: DataParams) -> None:
    """A row without pictures whose picture stands in a column of another name would be asked without it."""
    known = (params.problem_key, params.images_key, params.answer_key)
    for key in _IMAGE_COLUMNS:
        value = None if key in known else plain(row.get(key))
        if value is not None and not (isinstance(value, str | list) and not value):
            raise RowError(
                "unnamed_image",
                f"column {key!r} holds what looks like a picture, and data.images_key is {params.images_key!r}",
            )


def row_id(raw: object, split: str, index: int) -> str:
    """The row's own id if it has one, else split and position."""
    own = plain(cast("Mapping[str, object]", raw).get("id")) if isinstance(raw, Mapping) else None
    return str(own) if isinstance(own, str | int) and str(own) else f"{split}/{index:06d}"


def _image_list(value: object, name: str) -> list[ImageSource]:
    value = plain(value)
    items = value if isinstance(value, list) else [value]
    return [_image(item, f"{name}_{i}") for i, item in enumerate(cast("list[object]", items))]


def _image(value: object, name: str) -> ImageSource:
    """One picture in any of its forms: URL, path, data URI, base64, bytes, {"bytes","path"}, {"url"}, array, PIL."""
    value = plain(value)
    if isinstance(value, Mapping):
        struct = cast("Mapping[str, object]", value)
        for key in ("bytes", "url", "path"):
            if struct.get(key) not in (None, b""):
                return _image(struct[key], name)
        raise RowError(
            "bad_image", f"an image struct needs bytes, url or path, got keys {sorted(struct)}"
        )
    if isinstance(value, Embedded):
        return value
    if isinstance(value, str) and value.strip():
        data = _bare_base64(value.strip())
        return value.strip() if data is None else embed(data, name)
    return embed(value, name)


def _bare_base64(text: str) -> bytes | None:
    """The picture that a text is in base64 without `data:` in front, as many datasets have it; None for an address."""
    if _BASE64.fullmatch(text) is None:
        return None
    try:
        data = decode_data_uri(f"data:;base64,{text}")
    except RowError:
        return None
    return data if sniff(data) in FORMATS else None


def _prompt(
    row: Mapping[str, object], params: DataParams, images: list[ImageSource], name: str
) -> tuple[Turns, list[ImageSource]]:
    """Turns with tags, and the pictures in the order of their tags."""
    value = _column(row, params.problem_key)
    if value is None or (isinstance(value, str | list) and not value):
        raise RowError(
            "missing_problem", f"column {params.problem_key!r} is empty; the row has {sorted(row)}"
        )
    is_chat = isinstance(value, list) and all(
        isinstance(item, Mapping) and ("role" in item or "from" in item)
        for item in cast("list[object]", value)
    )
    messages = (
        cast("list[Mapping[str, object]]", value)
        if is_chat
        else [{"role": "user", "content": value}]
    )
    own: list[ImageSource | None] = []
    turns = tuple(
        (
            _role(message),
            _content(message.get("content", message.get("value")), own, f"{name}_part"),
        )
        for message in messages
    )
    if turns[-1][0] != "user":
        raise RowError(
            "bad_role", f"the last message of a prompt must be the user's, got {turns[-1][0]!r}"
        )
    if not any(own):
        return turns, images
    return turns, _interleave(own, images)


def _role(message: Mapping[str, object]) -> str:
    role = message.get("role", message.get("from"))  # ShareGPT: {"from": "human", "value": ...}
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RowError("bad_role", f"role {role!r} is none of {', '.join(ROLES)}")
    return str(role)


def _content(value: object, own: list[ImageSource | None], name: str) -> str:
    """Text with tags of one message; `own` gets one entry per tag: its own source, or None."""
    value = plain(value)
    if isinstance(value, str):
        text = value.replace(_RENDERED_IMAGE, IMAGE_TAG)
        own.extend([None] * text.count(IMAGE_TAG))
        return text
    if not isinstance(value, list) or not value:
        raise RowError(
            "bad_content", f"content must be text or a list of parts, got {type(value).__name__}"
        )
    return "".join(
        _part(part, own, f"{name}{i}") for i, part in enumerate(cast("list[object]", value))
    )


def _part(value: object, own: list[ImageSource | None], name: str) -> str:
    value = plain(value)
    if isinstance(value, str):
        return _content(value, own, name)
    if not isinstance(value, Mapping):
        raise RowError(
            "bad_content", f"a content part must be text or a mapping, got {type(value).__name__}"
        )
    # Arrow fills the keys that other parts of the column have with None.
    part = {k: v for k, v in cast("Mapping[str, object]", value).items() if v is not None}
    given = [part[key] for key in _PICTURE_KEYS if key in part]
    if "type" not in part and "text" not in part and not given:
        raise RowError(
            "bad_content", f"a content part has neither text nor image, got keys {sorted(part)}"
        )
    kind = part.get("type", "text" if "text" in part else "image")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RowError("bad_content", f"a text part needs text, got {part.get('text')!r}")
        return _content(part["text"], own, name)
    if kind not in ("image", "image_url"):
        raise RowError(
            "unsupported_media", f"content part of type {kind!r}; text and image are known"
        )
    own.append(_image(given[0], name) if given else None)
    return IMAGE_TAG


def _interleave(
    own: Sequence[ImageSource | None], images: Sequence[ImageSource]
) -> list[ImageSource]:
    """Parts with a source of their own use it; bare tags take the row's pictures in order."""
    bare = sum(source is None for source in own)
    if bare != len(images):
        raise RowError(
            "image_count",
            f"images={len(images)} placeholders={bare} beside {len(own) - bare} parts that bring their own",
        )
    rest = iter(images)
    return [next(rest) if source is None else source for source in own]


def _check_tags(turns: Turns, num_images: int, *, add_tag: bool) -> tuple[Turns, bool]:
    num_tags = sum(text.count(IMAGE_TAG) for _, text in turns)
    if num_tags == num_images:
        return turns, False
    if num_tags == 0 and add_tag:
        first = next(i for i, (role, _) in enumerate(turns) if role == "user")
        tagged = ("user", IMAGE_TAG * num_images + turns[first][1])
        return (*turns[:first], tagged, *turns[first + 1 :]), True
    raise RowError("image_count", f"images={num_images} placeholders={num_tags}")


def _answer(row: Mapping[str, object], key: str, parse_answer: Callable[[str], str]) -> str:
    value = _column(row, key)
    if isinstance(value, list):
        values = cast("list[object]", value)
        if len(values) > 1:
            raise RowError("ambiguous_answer", f"column {key!r} holds {len(values)} answers")
        value = plain(values[0]) if values else None
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError("missing_answer", f"column {key!r} is empty; the row has {sorted(row)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise RowError(
            "bad_answer", f"column {key!r} must be text or a number, got {type(value).__name__}"
        )
    try:
        answer = parse_answer(value if isinstance(value, str) else _number_text(value))
    except ValueError as error:
        raise RowError("bad_answer", str(error)) from None
    return answer


def _number_text(value: int | float | Decimal) -> str:
    """A number as its column was written: 3.0 is 3, and 0.1 of 32 bits is 0.1 and not 0.10000000149011612.

    Raises:
        ValueError: it is infinite or no number.
    """
    if not math.isfinite(value):
        raise ValueError(f"a label must be finite, got {value}")
    if not isinstance(value, float):
        return str(value)
    if value.is_integer():
        return str(int(value))
    narrow = np.float32(value)
    return str(narrow if float(narrow) == value else value)


def _json(value: object) -> Json:
    """JSON as is; what JSON cannot hold becomes its short repr, so that nothing vanishes."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)[:200]
    return cast("Json", value)
