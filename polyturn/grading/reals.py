"""Bounded real arithmetic: exact on rationals, 60 digits elsewhere, refusal instead of unbounded work."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from mpmath import MPContext
from mpmath.libmp import from_rational, to_rational

BITS = 220  # precision of an inexact value, about 66 digits
MAX_BITS = 50_000  # of a numerator or denominator
MAX_FACTORIAL = 3_000
EQUAL = Fraction(1, 10**45)  # relative difference up to which inexact values are one
ZERO = Fraction(1, 10**50)  # inexact values below it are zero (a cancellation such as sin(pi))

_Mpf = object  # mpmath has no types; values pass through here only
_LOCK = threading.Lock()  # an mpmath context is shared state
_MP = MPContext()
_MP.prec = BITS + 40


class NotRealError(ValueError):
    """The value is no real number, or too large to be computed; the message says which."""


@dataclass(frozen=True)
class Real:
    """A real number; `value` is rounded to BITS bits where it is not `is_exact`."""

    value: Fraction
    is_exact: bool = True

    def __add__(self, other: Real) -> Real:
        return _bounded(self.value + other.value, self.is_exact and other.is_exact)

    def __neg__(self) -> Real:
        return Real(-self.value, self.is_exact)

    def __mul__(self, other: Real) -> Real:
        return _bounded(self.value * other.value, self.is_exact and other.is_exact)

    def __truediv__(self, other: Real) -> Real:
        if is_zero(other):
            raise NotRealError("division by zero")
        return _bounded(self.value / other.value, self.is_exact and other.is_exact)


def is_zero(number: Real) -> bool:
    """Whether the number is 0; inexact ones are when they are below ZERO."""
    return number.value == 0 or (not number.is_exact and abs(number.value) < ZERO)


def equal(left: Real, right: Real) -> bool:
    """Whether two numbers are one: exactly for rationals, to 45 significant digits else."""
    if left.is_exact and right.is_exact:
        return left.value == right.value
    if is_zero(left) or is_zero(right):
        return max(abs(left.value), abs(right.value)) < ZERO
    return abs(left.value - right.value) <= EQUAL * max(abs(left.value), abs(right.value))


def power(base: Real, exponent: Real) -> Real:
    """base ** exponent.

    Raises:
        NotRealError: it is not real, or too large to be computed.
    """
    if exponent.is_exact and exponent.value.denominator == 1:
        return _integer_power(base, exponent.value.numerator)
    if base.value < 0 and exponent.is_exact and exponent.value.denominator % 2:
        root = power(-base, exponent)
        return root if exponent.value.numerator % 2 == 0 else -root
    if exponent.is_exact and exponent.value.denominator <= MAX_BITS.bit_length():
        return _integer_power(root_of(base, exponent.value.denominator), exponent.value.numerator)
    if base.value <= 0:
        raise NotRealError("a power of a negative number")
    return exp(log(base) * exponent)


def _integer_power(base: Real, exponent: int) -> Real:
    if exponent < 0 and is_zero(base):
        raise NotRealError("division by zero")
    width = max(base.value.numerator.bit_length(), base.value.denominator.bit_length())
    if abs(exponent) * max(width - 1, 0) > (MAX_BITS if base.is_exact else MAX_BITS * BITS):
        raise NotRealError("a power that is too large")
    if base.is_exact:
        return Real(base.value**exponent)
    if abs(exponent) > MAX_BITS:
        raise NotRealError("a power that is too large")
    result, square, left = Real(Fraction(1), False), base, abs(exponent)
    while left:
        result = result * square if left & 1 else result
        left >>= 1
        square = square * square if left else square
    return result if exponent >= 0 else Real(Fraction(1)) / result


def root_of(number: Real, degree: int) -> Real:
    """The real root of a degree; exact where the number is a rational power.

    Raises:
        NotRealError: an even root of a negative number, or a degree below 1.
    """
    if degree < 1 or degree > MAX_BITS:
        raise NotRealError(f"a root of degree {degree}")
    if number.value < 0:
        if degree % 2 == 0:
            raise NotRealError("an even root of a negative number")
        return -root_of(-number, degree)
    if number.is_exact:
        parts = (
            _integer_root(number.value.numerator, degree),
            _integer_root(number.value.denominator, degree),
        )
        if parts[0] is not None and parts[1] is not None:
            return Real(Fraction(parts[0], parts[1]))
    return _evaluate(lambda x: _MP.root(x, degree), number)


def _integer_root(number: int, degree: int) -> int | None:
    if degree == 2:
        guess = math.isqrt(number)
        return guess if guess * guess == number else None
    if number.bit_length() > 1_000:
        return None
    guess = round(number ** (1 / degree))
    return next((n for n in (guess - 1, guess, guess + 1) if n >= 0 and n**degree == number), None)


def exp(number: Real) -> Real:
    """e ** number.

    Raises:
        NotRealError: it is too large to be computed.
    """
    if abs(number.value) > MAX_BITS // 2:
        raise NotRealError("a power that is too large")
    return _evaluate(_MP.exp, number)


def log(number: Real) -> Real:
    """The natural logarithm.

    Raises:
        NotRealError: of a number that is not positive.
    """
    if number.value <= 0:
        raise NotRealError("a logarithm of a number that is not positive")
    return _evaluate(_MP.log, number)


def pi() -> Real:
    """The circle constant."""
    return _evaluate(lambda x: x * _MP.pi, Real(Fraction(1)))


def trigonometric(name: str, number: Real) -> Real:
    """sin, cos, tan, sec, csc, cot of radians; asin, acos, atan.

    Raises:
        NotRealError: outside of the function's domain.
    """
    if name in ("sec", "csc", "cot"):
        turned = {"sec": "cos", "csc": "sin", "cot": "tan"}[name]
        return Real(Fraction(1)) / trigonometric(turned, number)
    if name in ("asin", "acos") and abs(number.value) > 1:
        raise NotRealError(f"{name} of a number above 1")
    return _evaluate(getattr(_MP, name), number)


def factorial(number: Real) -> Real:
    """n! of a small natural number.

    Raises:
        NotRealError: of anything else.
    """
    if (
        number.value.denominator != 1
        or not 0 <= number.value <= MAX_FACTORIAL
        or not number.is_exact
    ):
        raise NotRealError(f"a factorial of no natural number up to {MAX_FACTORIAL}")
    return Real(Fraction(math.factorial(number.value.numerator)))


def binomial(upper: Real, lower: Real) -> Real:
    """n choose k of small natural numbers.

    Raises:
        NotRealError: of anything else.
    """
    for number in (upper, lower):
        if (
            number.value.denominator != 1
            or not 0 <= number.value <= MAX_FACTORIAL
            or not number.is_exact
        ):
            raise NotRealError(f"a binomial of no natural numbers up to {MAX_FACTORIAL}")
    return Real(Fraction(math.comb(upper.value.numerator, lower.value.numerator)))


def _evaluate(function: Callable[[_Mpf], _Mpf], number: Real) -> Real:
    if max(number.value.numerator.bit_length(), number.value.denominator.bit_length()) > MAX_BITS:
        raise NotRealError("a number that is too large")
    with _LOCK:
        argument = _MP.make_mpf(
            from_rational(number.value.numerator, number.value.denominator, _MP.prec)
        )
        result = function(argument)
        parts = cast("tuple[int, int]", to_rational(result._mpf_))  # type: ignore[attr-defined]
    return _bounded(Fraction(*parts), False)


def _bounded(value: Fraction, is_exact: bool) -> Real:
    up, down = value.numerator.bit_length(), value.denominator.bit_length()
    if is_exact or value == 0:
        if max(up, down) > MAX_BITS:
            raise NotRealError("a number that is too large")
        return Real(value, is_exact)
    shift = BITS - (up - down)
    if abs(shift) > MAX_BITS:
        raise NotRealError("a number that is too large")
    scale = Fraction(2) ** shift
    return Real(Fraction(round(value * scale)) / scale, False)
