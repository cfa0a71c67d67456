r"""Parts of the real line: intervals, inequalities that are solved for a variable, and their unions.

`(3, 5]`, `3 < x \leq 5` and `5 \geq x > 3` are one set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polyturn.grading import clean, numbers, values
from polyturn.grading.compare import Policy, same_number
from polyturn.grading.numbers import NotANumberError, Number

_LESS = re.compile(r"\\lt(?![A-Za-z])|&lt;")
_GREATER = re.compile(r"\\gt(?![A-Za-z])|&gt;")
_ELEMENT = re.compile(r"^([A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<![A-Za-z])or(?![A-Za-z])")
_BOTH = re.compile(r",(?!\d{3}(?!\d))|(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_RELATION = re.compile(r"(\\[lg]e(?:q|qq|qslant)?(?![A-Za-z])|[<>]=?)")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|lambda)")
_INFINITY = re.compile(r"([-+]?)\s*\\infty")


@dataclass(frozen=True)
class Interval:
    """All numbers between two bounds, of which each belongs to it or not; None: unbounded."""

    low: Number | None
    high: Number | None
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Line:
    """A union of intervals, as written; the variable is None where none is named."""

    intervals: tuple[Interval, ...]
    variable: str | None


def same(answer: str, expected: str, policy: Policy) -> bool | None:
    """Whether two texts say the same part of the line; None where one of them says none."""
    left, right = read(answer), read(expected)
    if left is None or right is None:
        return None
    if left.variable and right.variable and left.variable != right.variable:
        return False
    return len(left.intervals) == len(right.intervals) and all(
        any(_same(own, other, policy) for other in right.intervals) for own in left.intervals
    )


@lru_cache(maxsize=8192)
def read(text: str) -> Line | None:
    """The part of the line that a text says; None where it says none, or bounds that are no numbers."""
    try:
        shown = clean.trim(clean.plain(_GREATER.sub(">", _LESS.sub("<", text))))
        element = _ELEMENT.match(shown)
        parts = [
            _part(part.strip()) for part in _UNION.split(shown[element.end() if element else 0 :])
        ]
    except (clean.TooLongError, NotANumberError):
        return None
    variables = {variable for _, variable in parts if variable}
    variables |= {element.group(1)} if element else set()
    intervals = tuple(interval for interval, _ in parts if interval)
    if len(intervals) < len(parts) or len(variables) > 1:
        return None
    return Line(intervals, next(iter(variables), None))


def _part(text: str) -> tuple[Interval | None, str | None]:
    """One interval, and the variable of its inequality."""
    if _RELATION.search(text):
        return _between([_inequality(part) for part in _BOTH.split(text)])
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None, None
    bounds = values.split(text[1:-1], ",;")
    if len(bounds) != 2:
        return None, None
    return Interval(
        _bound(bounds[0], "-"), _bound(bounds[1], "+"), text[0] == "[", text[-1] == "]"
    ), None


def _between(
    found: list[tuple[Interval | None, str | None]],
) -> tuple[Interval | None, str | None]:
    """What one inequality says, or two of one variable of which one is a lower bound: `x > 3 and x < 5`."""
    if len(found) == 1:
        return found[0]
    ordered = sorted(found, key=lambda item: item[0] is not None and item[0].low is None)
    (low, variable), (high, other) = ordered if len(ordered) == 2 else ((None, None), (None, None))
    if low is None or high is None or variable != other or low.high or high.low:
        return None, None
    return Interval(low.low, high.high, low.has_low, high.has_high), variable


def _inequality(text: str) -> tuple[Interval | None, str | None]:
    """`3 < x <= 5`, `x > 3`, `3 < x`."""
    sides = [side.strip() for side in _RELATION.split(text)]
    relations = sides[1::2]
    is_falling = [relation.startswith((">", "\\g")) for relation in relations]
    if len(set(is_falling)) != 1 or len(sides) > 5:
        return None, None
    if is_falling[0]:
        sides = sides[::-1]
    terms, closed = sides[0::2], [relation not in ("<", ">") for relation in sides[1::2]]
    place = next((i for i, term in enumerate(terms) if _VARIABLE.fullmatch(term)), None)
    if place is None or (len(terms) == 3 and place != 1):
        return None, None
    low = _bound(terms[place - 1], "-") if place > 0 else None
    high = _bound(terms[place + 1], "+") if place + 1 < len(terms) else None
    has_low, has_high = place > 0 and closed[place - 1], place < len(closed) and closed[place]
    return Interval(low, high, has_low, has_high), terms[place]


def _bound(text: str, infinite: str) -> Number | None:
    """A bound; None where it is the infinity of the sign `infinite`.

    Raises:
        NotANumberError: it is neither.
    """
    found = _INFINITY.fullmatch(text.strip())
    if found is None:
        return numbers.parse(clean.without_units(text.strip()))
    if (found.group(1) or "+") != infinite:
        raise NotANumberError("an interval from or to the wrong infinity")
    return None


def _same(own: Interval, other: Interval, policy: Policy) -> bool:
    if (own.has_low, own.has_high) != (other.has_low, other.has_high):
        return False
    pairs = ((own.low, other.low), (own.high, other.high))
    return all(
        one is two if one is None or two is None else same_number(one, two, policy) is not None
        for one, two in pairs
    )
