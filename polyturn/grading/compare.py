"""Whether two answers are one."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from polyturn.grading import reals
from polyturn.grading.numbers import Number
from polyturn.grading.values import Collection, Value

LONG_DECIMAL = (
    8  # significant digits from which a decimal stands for the exact value that it agrees with
)

DOUBLE_DIGITS = 16  # significant digits from which a decimal is a double, exact to a unit of 2**-52

_DOUBLE = Fraction(1, 2**52)

Rounding = Literal["reference", "strict"]


@dataclass(frozen=True)
class Policy:
    """What counts as equal; see docs/grading.md."""

    tolerance: float = 0.0  # relative
    rounding: Rounding = "reference"
    timeout_s: float = 2.0  # of one symbolic comparison


def same_value(prediction: Value, reference: Value, policy: Policy) -> str | None:
    """Why two values count as one; None when they do not."""
    if isinstance(prediction, Number) != isinstance(reference, Number):
        prediction, reference = _only_element(prediction), _only_element(reference)
    if isinstance(prediction, Number) and isinstance(reference, Number):
        return same_number(prediction, reference, policy)
    if isinstance(prediction, Collection) and isinstance(reference, Collection):
        return _same_collection(prediction, reference, policy)
    return None


def _only_element(value: Value) -> Value:
    r"""The number of a set that holds one, in one form or several (`8\sqrt{3} or 13.86`), as a solution set is written."""
    if not isinstance(value, Collection) or value.kind != "set":
        return value
    first = min(
        value.items, key=lambda item: isinstance(item, Number) and item.decimals is not None
    )
    if all(same_value(first, item, Policy()) for item in value.items):
        return first
    return value


def same_number(prediction: Number, reference: Number, policy: Policy) -> str | None:
    """Why two numbers count as one; None when they do not."""
    if reals.equal(prediction.real, reference.real):
        return "equal"
    difference = abs(prediction.real.value - reference.real.value)
    if policy.tolerance and difference <= Fraction(policy.tolerance) * abs(reference.real.value):
        return "within tolerance"
    has_double = _is_double(prediction) or _is_double(reference)
    if has_double and difference <= _DOUBLE * abs(reference.real.value):
        return "equal as doubles"
    is_exact = prediction.decimals is None or _num_digits(prediction) >= LONG_DECIMAL
    if policy.rounding == "reference" and reference.decimals is not None and is_exact:
        return "rounds to the reference" if difference <= _half_unit(reference) else None
    if reference.decimals is None and prediction.decimals is not None and is_exact:
        return "agrees to all digits" if difference < 2 * _half_unit(prediction) else None
    return None


def _is_double(number: Number) -> bool:
    """Whether a decimal has as many digits as a computed one that is printed in full."""
    return number.decimals is not None and _num_digits(number) >= DOUBLE_DIGITS


def _half_unit(decimal: Number) -> Fraction:
    """Half a unit of a decimal's last digit."""
    return Fraction(1, 2 * 10 ** (decimal.decimals or 0))


def _num_digits(decimal: Number) -> int:
    """Significant digits of a decimal as it is written, zeros at its end included."""
    return len(str(abs(decimal.real.value * 10 ** (decimal.decimals or 0))))


def _same_collection(prediction: Collection, reference: Collection, policy: Policy) -> str | None:
    if prediction.kind != reference.kind:
        return None
    if reference.kind != "set":
        pairs = zip(prediction.items, reference.items, strict=False)
        is_same = len(prediction.items) == len(reference.items) and all(
            same_value(*pair, policy) for pair in pairs
        )
        return "equal" if is_same else None
    forward = all(any(same_value(p, r, policy) for r in reference.items) for p in prediction.items)
    backward = all(any(same_value(p, r, policy) for p in prediction.items) for r in reference.items)
    return "equal sets" if forward and backward else None
