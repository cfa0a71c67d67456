"""Equal by construction matches, different does not: random values through random spellings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyturn.reward import answers_match, extract_answer, grade


@dataclass(frozen=True)
class Surd:
    """rational * sqrt(radicand) * pi**has_pi, with a radicand without square factors."""

    rational: Fraction
    radicand: int = 1
    has_pi: bool = False

    @property
    def value(self) -> float:
        return float(self.rational) * math.sqrt(self.radicand) * (math.pi if self.has_pi else 1)


rationals = st.fractions(min_value=-500, max_value=500, max_denominator=60)
surds = st.builds(
    Surd, rationals.filter(bool), st.sampled_from([1, 2, 3, 5, 6, 7, 10, 13]), st.booleans()
)


def spell_rational(rng: random.Random, q: Fraction) -> str:
    """One of the spellings of a rational number."""
    sign, size = ("-" if q < 0 else ""), abs(q)
    top, bottom = size.numerator, size.denominator
    scale = rng.randint(1, 4)
    forms = [
        f"{sign}\\frac{{{top * scale}}}{{{bottom * scale}}}",
        f"{sign}\\dfrac {{ {top} }} {{ {bottom} }}",
        f"{sign}{top}/{bottom}",
        f"{sign}{top * scale} / {bottom * scale}",
        f"\\frac{{{sign}{top}}}{{{bottom}}}",
    ]
    if bottom == 1:
        forms += [f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top:,}", f"{sign}{top}.00"]
    if top > bottom > 1:
        whole, rest = divmod(top, bottom)
        forms += [f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}"]
    if 10**6 % bottom == 0:
        forms.append(f"{sign}{format(float(size), 'f')}")
    return rng.choice(forms)


def spell_root(rng: random.Random, radicand: int) -> str:
    """One of the spellings of a square root."""
    forms = [
        f"\\sqrt{{{radicand}}}",
        f"\\sqrt {{ {radicand} }}",
        f"√{radicand}",
        f"√({radicand})",
        f"sqrt({radicand})",
    ]
    return rng.choice(
        [
            *forms,
            f"{radicand}^{{1/2}}",
            f"\\sqrt{radicand}" if radicand < 10 else f"\\sqrt({radicand})",
        ]
    )


def spell(rng: random.Random, surd: Surd) -> str:
    """One of the spellings of a value: coefficient, root and pi in some order, with some product sign."""
    rational, factors = surd.rational, []
    if surd.radicand > 1:
        scale = rng.choice([1, 1, 2])
        rational /= scale
        factors.append(spell_root(rng, surd.radicand * scale**2))
    if surd.has_pi:
        factors.append(rng.choice(["\\pi", "π", "pi"]))
    rng.shuffle(factors)
    first = spell_rational(rng, rational)
    if not factors:
        return first
    if " " in first or "/" in first:
        first = (
            f"({first})"
            if " " not in first.strip() or "/" not in first
            else f"\\frac{{{rational.numerator}}}{{{rational.denominator}}}"
        )
    sign = rng.choice(["*", " \\cdot ", "×", " \\times "] + [" "] * (not factors[0][0].isdigit()))
    return first + sign + "*".join(factors)


DECORATIONS: list[Callable[[str], str]] = [
    str,
    lambda s: f"${s}$",
    lambda s: f"\\({s}\\)",
    lambda s: f"x = {s}",
    lambda s: f"m\\angle ABC = {s}",
    lambda s: f"{s} \\text{{ cm}}",
    lambda s: f"{s} cm^2",
    lambda s: f"{s}^\\circ" if s[-1].isdigit() or s[-1] == "}" else s,
    lambda s: f"{s} units",
]
WRAPPINGS: list[Callable[[str], str]] = [
    str,
    lambda s: f"\\boxed{{{s}}}",
    lambda s: f"We get 3 and 4.\nAnswer: \\boxed{{{s}}}",
    lambda s: f"\\boxed{{7}} is wrong. Now \\fbox{{{s}}} because \\boxed{{",
    lambda s: f"<think>It may be \\boxed{{1}}.</think> \\boxed{{ {s} }}.",
    lambda s: f"<answer>{s}</answer>",
    lambda s: f"The answer is ${s}$.",
    lambda s: f"\\boxed{{\\boxed{{{s}}}}}",
]


def written(rng: random.Random, surd: Surd) -> str:
    return rng.choice(WRAPPINGS)(rng.choice(DECORATIONS)(spell(rng, surd)))


@given(surd=surds, seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_all_spellings_of_a_value_match(surd: Surd, seed: int) -> None:
    rng = random.Random(seed)
    prediction, reference = written(rng, surd), spell(rng, surd)
    verdict = grade(prediction, reference, rounding="strict")
    assert verdict.match, (prediction, reference, verdict)


@given(one=surds, two=surds, seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_spellings_of_different_values_do_not_match(one: Surd, two: Surd, seed: int) -> None:
    assume(one != two)
    rng = random.Random(seed)
    prediction, reference = written(rng, one), spell(rng, two)
    assert not answers_match(prediction, reference, rounding="strict"), (prediction, reference)


@given(
    surd=surds,
    seed=st.integers(0, 2**32),
    step=st.sampled_from([Fraction(1), Fraction(-1), Fraction(1, 60), Fraction(1, 10**9)]),
)
@settings(deadline=None)
def test_a_value_next_to_it_does_not_match(surd: Surd, seed: int, step: Fraction) -> None:
    rng = random.Random(seed)
    near = Surd(surd.rational + step, surd.radicand, surd.has_pi)
    assume(near.rational != 0)
    assert not answers_match(written(rng, near), spell(rng, surd), rounding="strict")


@given(value=st.floats(0.01, 500), decimals=st.integers(1, 2))
@settings(deadline=None)
def test_an_exact_value_matches_its_own_rounding_only(value: float, decimals: int) -> None:
    exact = Fraction(value)
    assume(abs((exact * 10**decimals) % 1 - Fraction(1, 2)) > Fraction(1, 10**6))
    prediction = f"\\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    rounded = round(exact, decimals)
    assert answers_match(prediction, f"{float(rounded):.{decimals}f}")
    for step in (-1, 1):
        other = rounded + Fraction(step, 10**decimals)
        if other > 0:
            assert not answers_match(prediction, f"{float(other):.{decimals}f}")


@given(text=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_verdict(text: str) -> None:
    extract_answer(text)
    verdict = grade(text, "3\\sqrt{2}")
    assert verdict.failure is None


PIECES = [
    "\\boxed{",
    "}",
    "{",
    "\\frac",
    "\\sqrt",
    "^",
    "(",
    ")",
    "=",
    "$",
    "\\",
    ",",
    "1",
    "π",
    " ",
    "\\pm",
    "!",
    "e9",
    "|",
    "°",
    "x",
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_string_of_notation_gets_a_verdict(pieces: list[str]) -> None:
    verdict = grade("".join(pieces), "\\frac{1}{7}")
    assert verdict.failure is None
