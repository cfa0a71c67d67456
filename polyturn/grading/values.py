r"""What an answer says: a number, or a collection of numbers (tuple, interval, set, `\pm`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from polyturn.grading import clean, numbers
from polyturn.grading.numbers import NotANumberError, Number, RefusedError
from polyturn.grading.reals import NotRealError

MAX_ITEMS = 100
MAX_DEPTH = 4

Kind = Literal["set", "()", "(]", "[)", "[]", ":"]  # ":" a ratio of three or more

_AND = re.compile(r"[,;]?\s*(?<![A-Za-z])(?:and|or)(?![A-Za-z])\s*,?")
_RATIO_SIGN = re.compile(r"(?<=\S):(?=\S)")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Collection:
    """Numbers that belong together; in a "set" (also a bare list) neither order nor repetition counts.

    Those of a ratio are divided by its first.
    """

    kind: Kind
    items: tuple[Number | Collection, ...]


Value = Number | Collection


def read(text: str) -> Value:
    """The number or collection that an answer says.

    Raises:
        NotANumberError: it says neither; RefusedError where it is one that is not computed.
    """
    try:
        return numbers.read(text)
    except RefusedError:
        raise
    except NotANumberError as error:
        collection = _parse(text)
        if collection is None:
            raise NotANumberError(str(error)) from None
        return collection


def read_collection(text: str) -> Collection | None:
    """The collection that an answer says; None when it says none (a number with a decimal comma may be both)."""
    try:
        return _parse(text)
    except RefusedError:
        return None


@lru_cache(maxsize=8192)
def _parse(text: str) -> Collection | None:
    try:
        shown = clean.trim(clean.plain(text)).replace("\\{", "{").replace("\\}", "}")
        shown = _AND.sub(",", shown)
        if len(split(shown, ",;")) == 1:
            shown = clean.right_side(shown)
        return _collection(shown, 0)
    except clean.TooLongError as error:
        raise RefusedError(str(error)) from None
    except RefusedError:
        raise
    except NotRealError as error:
        raise RefusedError(str(error)) from None
    except NotANumberError:
        return None


@lru_cache(maxsize=8192)
def assignments(text: str) -> Mapping[str, Number] | None:
    """The number of each name in `x = 5, y = 12`; None where a part is no assignment or a name comes twice."""
    found: dict[str, Number] = {}
    try:
        parts = split(_AND.sub(",", clean.trim(clean.plain(text))), ",;")
        for part in parts:
            name, _, value = part.partition("=")
            if not clean.is_name(name):
                return None
            found[re.sub(r"[\s{}]", "", name)] = numbers.parse(clean.without_units(value.strip()))
    except (clean.TooLongError, NotANumberError):
        return None
    return found if len(parts) > 1 and len(found) == len(parts) else None


def _collection(shown: str, depth: int) -> Collection | None:
    if depth > MAX_DEPTH:
        return None
    kind: Kind = "set"
    parts = split(shown, ",;")
    if len(terms := _RATIO_SIGN.split(shown)) > 2 and len(parts) == 1:
        reals = [numbers.parse(term).real for term in terms]
        return Collection(":", tuple(Number(real / reals[0]) for real in reals))
    if len(parts) == 1 and _is_wrapped(shown):
        inner = split(shown[1:-1], ",;")
        if len(inner) > 1 or shown[0] == "{":
            kind = "set" if shown[0] == "{" else _interval(shown[0] + shown[-1])
            parts = inner
    elif len(groups := split(shown, ";")) > 1 and len(parts) > len(groups):
        parts = [f"({group})" for group in groups]  # p=5, q=2; p=7, q=2
    if len(parts) == 1 and kind == "set" and shown[:1] != "{" and not _PLUS_MINUS.search(shown):
        return None
    if not parts or len(parts) > MAX_ITEMS:
        return None
    items = tuple(item for part in parts for item in _items(part, depth))
    return Collection(kind, items)


def _interval(brackets: str) -> Kind:
    return {"()": "()", "(]": "(]", "[)": "[)", "[]": "[]"}[brackets]  # type: ignore[return-value]


def _items(part: str, depth: int) -> list[Value]:
    part = part if _is_wrapped(part) else clean.trim(clean.right_side(part))
    if _PLUS_MINUS.search(part):
        return [numbers.parse(_PLUS_MINUS.sub(sign, part)) for sign in "+-"]
    nested = _collection(part, depth + 1)
    if nested is not None:
        return [nested]
    return [numbers.parse(clean.without_units(part))]


def _is_wrapped(shown: str) -> bool:
    """Whether the first bracket closes with the last character; the closing one may be of the other kind."""
    if shown[:1] not in _BRACKETS or shown[-1:] not in (")", "]", "}"):
        return False
    if (shown[0] == "{") != (shown[-1] == "}"):
        return False
    depth = 0
    for position, character in enumerate(shown):
        depth += character in "([{"
        depth -= character in ")]}"
        if depth == 0:
            return position == len(shown) - 1
    return False


def split(shown: str, separators: str) -> list[str]:
    """The parts between the separators that stand in no bracket."""
    parts = [""]
    depth = 0
    for character in shown:
        depth += character in "([{"
        depth -= character in ")]}"
        if character in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
