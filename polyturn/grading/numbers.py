r"""Numbers as people and models write them.

Sums of products of powers; implicit products (`3\sqrt{2}\pi`), mixed numbers (`2\frac{3}{4}`, `2 3/4`), repeating decimals, roots,
trigonometric functions and their inverses, logarithms, factorials, binomials, absolute values and degrees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from polyturn.grading import clean, reals
from polyturn.grading.reals import NotRealError, Real

MAX_DEPTH = 40  # of nested brackets
MAX_DIGITS = 2_000  # of one number
MAX_EXPONENT = 5_000  # of scientific notation

_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|\\?([A-Za-z]+)|(\*\*|[-+*/^!(){}\[\]|_°]))"
)
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)")
_DECIMAL_COMMA = re.compile(r"^(-?\s*\d+),(\d+)$")
_DECIMAL = re.compile(r"^-?\s*\d*\.(\d+)$")
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)\s*\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?(?![\d{])"
)
_MIXED = re.compile(r"^(-?) ?(\d+) (\d+) ?/ ?(\d+) ?°?$")
_RATIO = re.compile(r"^([^:]*[^:\s]):([^:\s][^:]*)$")  # not `1: 30`
_CLOSING = {"(": ")", "[": "]", "{": "}"}

_TRIG = {"sin", "cos", "tan", "sec", "csc", "cot"}
_INVERSE = {
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
}
_FUNCTIONS = {"ln", "log", "lg", "exp", "abs", *_TRIG, *_INVERSE}
_STARTS = {"frac", "sqrt", "cbrt", "binom", "pi", "e", *_FUNCTIONS}


class NotANumberError(ValueError):
    """The text says no real number that can be read within the bounds; the message says why."""


class RefusedError(NotANumberError):
    """The text has the form of a number that is not real, or too large or too deep to be computed."""


@dataclass(frozen=True)
class Number:
    """A number and how it is written: `decimals` digits after the point, None when it is no plain decimal."""

    real: Real
    decimals: int | None = None


@lru_cache(maxsize=8192)
def read(text: str) -> Number:
    """The number that an answer says, units and an assignment's left side left out.

    Raises:
        NotANumberError: it says none.
    """
    try:
        shown = clean.without_units(clean.trim(clean.right_side(clean.plain(text))))
        return parse(shown)
    except clean.TooLongError as error:
        raise RefusedError(str(error)) from None


def parse(shown: str) -> Number:
    """The number that text in plain form says (see clean.plain).

    Raises:
        NotANumberError: it says none.
    """
    shown = _GROUPED.sub(lambda match: re.sub("[ ,]", "", match.group()), shown)
    shown = _DECIMAL_COMMA.sub(r"\1.\2", shown)
    shown = _REPEATING.sub(_as_fraction, shown)
    decimal = _DECIMAL.match(shown)
    if (ratio := _RATIO.match(shown)) is not None:
        return _quotient(*ratio.groups())
    shown = _MIXED.sub(_as_sum, shown)
    reader = _Reader(shown)
    try:
        value = reader.sum(0)
    except NotRealError as error:
        raise RefusedError(str(error)) from None
    if not reader.is_done:
        raise NotANumberError(f"{reader.seen!r} is not understood")
    return Number(value, len(decimal.group(1)) if decimal else None)


def _quotient(left: str, right: str) -> Number:
    """The value of the ratio left : right."""
    try:
        return Number(parse(left.strip()).real / parse(right.strip()).real)
    except NotRealError as error:
        raise RefusedError(str(error)) from None


def _as_sum(match: re.Match[str]) -> str:
    """`2 3/4` is 2 + 3/4; `4 10/3` is neither a mixed number nor a product."""
    sign, whole, top, bottom = match.groups()
    return f"{sign}({whole}+{top}/{bottom})" if 0 < int(top) < int(bottom) else match.group()


def _as_fraction(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` is (16 - 1) / 90."""
    whole, fixed, period = match.groups()
    if len(match.group()) > MAX_DIGITS:
        raise RefusedError("a decimal with a period that is too long")
    before = int(f"0{whole}{fixed}")
    top = int(f"{before}{period}") - before
    return f"({top}/{10 ** len(fixed) * (10 ** len(period) - 1)})"


def _tokens(shown: str) -> list[str]:
    found: list[str] = []
    position = 0
    while position < len(shown):
        match = _TOKEN.match(shown, position)
        if match is None:
            raise NotANumberError(f"{shown[position : position + 20]!r} is not understood")
        found.append(next(group for group in match.groups() if group is not None))
        position = match.end()
    if not found:
        raise NotANumberError("it is empty")
    return found


class _Reader:
    """A position in the tokens of an expression, moved on by each read (recursive descent)."""

    def __init__(self, shown: str) -> None:
        self._tokens = _tokens(shown.strip())
        self._position = 0
        self._in_trig = 0

    @property
    def is_done(self) -> bool:
        """Whether all tokens are read."""
        return self._position >= len(self._tokens)

    @property
    def seen(self) -> str:
        """The next token; "" at the end."""
        return self._tokens[self._position] if not self.is_done else ""

    def _skip(self, *options: str) -> bool:
        is_next = self.seen in options
        self._position += is_next
        return is_next

    def sum(self, depth: int) -> Real:
        """Terms joined by + and -."""
        total = self._product(depth)
        while self.seen in ("+", "-"):
            sign = self.seen
            self._position += 1
            term = self._product(depth)
            total = total + (term if sign == "+" else -term)
        return total

    def _product(self, depth: int) -> Real:
        result = self._signed(depth)
        while not self.is_done:
            if self._skip("*"):
                result = result * self._signed(depth)
            elif self._skip("/"):
                result = result / self._signed(depth)
            elif self._starts_factor():
                result = result * self._power(depth)
            else:
                break
        return result

    def _signed(self, depth: int) -> Real:
        is_negative = False
        while self.seen in ("+", "-"):
            is_negative ^= self.seen == "-"
            self._position += 1
        value = self._power(depth)
        return -value if is_negative else value

    def _starts_factor(self) -> bool:
        token = self.seen
        if _is_literal(token):
            return not _is_literal(self._tokens[self._position - 1])  # 5 7 is no product
        return token in ("(", "{") or token in _STARTS

    def _power(self, depth: int) -> Real:
        mixed = self._mixed()
        base = self._postfix(mixed if mixed is not None else self._atom(depth))
        if self._skip("^", "**"):
            return reals.power(base, self._signed(self._deeper(depth)))
        return base

    def _postfix(self, value: Real) -> Real:
        """Factorials and degree signs; a degree counts only inside of a trigonometric function."""
        while self.seen in ("!", "°"):
            if self._skip("!"):
                value = reals.factorial(value)
            elif self._skip("°") and self._in_trig:
                value = value * reals.pi() / Real(Fraction(180))
        return value

    def _mixed(self) -> Real | None:
        r"""A mixed number: an integer with a proper fraction of integers right after it."""
        window = self._tokens[self._position : self._position + 8]
        if len(window) < 8 or (window[1], window[2], *window[4:6], window[7]) != (
            "frac",
            "{",
            "}",
            "{",
            "}",
        ):
            return None
        whole, top, bottom = (
            Fraction(part) if part.isdigit() else None for part in (window[0], window[3], window[6])
        )
        if whole is None or top is None or bottom is None or not 0 < top < bottom:
            return None
        self._position += 8
        return Real(whole + top / bottom)

    def _atom(self, depth: int) -> Real:
        token = self.seen
        if token == "":
            raise NotANumberError("it ends too early")
        self._position += 1
        if _is_literal(token):
            return _literal(token)
        if token in _CLOSING:
            value = self.sum(self._deeper(depth))
            self._expect(_CLOSING[token])
            return value
        if token == "|":
            value = self.sum(self._deeper(depth))
            self._expect("|")
            return Real(abs(value.value), value.is_exact)
        return self._named(token, self._deeper(depth))

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise NotANumberError(f"{token!r} is missing")

    @staticmethod
    def _deeper(depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise RefusedError(f"it is nested deeper than {MAX_DEPTH}")
        return depth + 1

    def _named(self, name: str, depth: int) -> Real:
        if name == "pi":
            return reals.pi()
        if name == "e":
            return reals.exp(Real(Fraction(1)))
        if name == "frac":
            top = self._atom(depth)
            return top / self._atom(depth)
        if name == "binom":
            upper = self._atom(depth)
            return reals.binomial(upper, self._atom(depth))
        if name in ("sqrt", "cbrt"):
            return self._root(2 if name == "sqrt" else 3, depth)
        if name in _FUNCTIONS:
            return self._function(name, depth)
        raise NotANumberError(f"{name!r} is not understood")

    def _root(self, degree: int, depth: int) -> Real:
        if self._skip("["):
            degree = _natural(self.sum(depth))
            self._expect("]")
        return reals.root_of(self._atom(depth), degree)

    def _function(self, name: str, depth: int) -> Real:
        base = self._atom(depth) if self._skip("_") else None
        exponent = self._signed(depth) if self._skip("^", "**") else None
        if name in _TRIG and exponent is not None and exponent.value == -1:
            name, exponent = f"a{name}", None
        value = _apply(name, self._argument(name, depth), base)
        return value if exponent is None else reals.power(value, exponent)

    def _argument(self, name: str, depth: int) -> Real:
        """What stands in the brackets after a function, or the factors up to the next function."""
        self._in_trig += name in _TRIG
        if self.seen in _CLOSING:
            value = self._postfix(self._atom(depth))
        else:
            value = self._power(depth)
            while self._starts_factor() and self.seen not in _FUNCTIONS:
                value = value * self._power(depth)
        self._in_trig -= name in _TRIG
        return value


def _is_literal(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and len(token) > 1)


def _literal(token: str) -> Real:
    digits, _, exponent = token.lower().partition("e")
    if (
        len(digits) > MAX_DIGITS
        or len(exponent) > len(f"-{MAX_EXPONENT}")
        or abs(int(exponent or 0)) > MAX_EXPONENT
    ):
        raise RefusedError(f"the number {token[:20]}... is too long")
    return Real(
        Fraction(digits if digits[-1] != "." else digits[:-1]) * Fraction(10) ** int(exponent or 0)
    )


def _natural(real: Real) -> int:
    if not real.is_exact or real.value.denominator != 1:
        raise NotANumberError("the degree of a root must be an integer")
    return real.value.numerator


def _apply(name: str, value: Real, base: Real | None) -> Real:
    if name == "exp":
        return reals.exp(value)
    if name == "abs":
        return Real(abs(value.value), value.is_exact)
    if name in ("log", "ln", "lg"):
        logarithm = reals.log(value)
        if base is None:
            return logarithm if name != "lg" else logarithm / reals.log(Real(Fraction(10)))
        return logarithm / reals.log(base)
    return reals.trigonometric(_INVERSE.get(name, name), value)
