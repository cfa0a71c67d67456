"""Every written form of an answer, what it equals, and what it does not."""

from __future__ import annotations

import pytest

from polyturn.reward import answers_match, extract_answer, grade, parse_reference

ROOT_18 = [
    "3\\sqrt{2}",
    "3 \\sqrt 2",
    "3\\sqrt2",
    "3√2",
    "3 √(2)",
    "3\\cdot\\sqrt{2}",
    "3×√2",
    "\\sqrt{18}",
    "3*sqrt(2)",
]
ROOT_18 += [
    "\\frac{6}{\\sqrt{2}}",
    "18^{1/2}",
    "3 \\sqrt { 2 }",
    "$3\\sqrt{2}$",
    "\\(3\\sqrt{2}\\)",
    "x = 3\\sqrt{2}",
]
ROOT_18 += [
    "3\\sqrt{2} \\text{ cm}",
    "3\\sqrt{2} \\approx 4.24",
    "4.242640687119285",
    "3\\sqrt(2)",
    "\\sqrt{2}\\cdot 3",
]

THIRTY = [
    "30",
    "30.0",
    "30.",
    "030",
    "+30",
    "30°",
    "30^\\circ",
    "30^{\\circ}",
    "30 ^ { \\circ }",
    "{30}^\\circ",
]
THIRTY += [
    "30\\degree",
    "30 degrees",
    "30 deg",
    "30 \\text{ degrees}",
    "30º",
    "m\\angle A = 30",
    "\\angle ABC = 30^\\circ",
]
THIRTY += [
    "x = 30",
    "x=30",
    "$x = 30$",
    "AB = 30",
    "\\overline{AB} = 30",
    "30 cm",
    "30\\text{ cm}",
    "30\\,\\mathrm{cm}^2",
]
THIRTY += [
    "30 square units",
    "30 sq. ft",
    "30m²",
    "30 units^2",
    "30\\%",
    "30 percent",
    "30 pct",
    "\\$30",
    "30 in.",
    "30 mi/h",
]
THIRTY += [
    "about 30",
    "\\boxed{30}",
    "\\fbox{30}",
    "\\boxed 30",
    "\\boxed{\\boxed{30}}",
    "\\boxed{\\text{30}}",
    "**30**",
]
THIRTY += [
    "The answer is 30.",
    "Answer: 30",
    "**Answer:** 30",
    "so the angle is 30°.",
    "\\frac{90}{3}",
    "\\dfrac{60}{2}",
    "2\\cdot15",
]
THIRTY += [
    "5!/4",
    "\\binom{6}{2}\\cdot 2",
    "\\sqrt{900}",
    "60\\sin 30^\\circ",
    "60\\cos\\frac{\\pi}{3}",
    "10\\log_2 8",
    "|-30|",
    "３０",
]

THIRTY += [
    "\\boxed{\\approx 30}",
    "\\boxed{\\textbf{(C)}\\ 30}",
    "C. 30",
    "30\\;\\mathrm{ft}",
    "\\text{Area} = 30",
    "30\\text{°}",
]

FORMS = {
    "3 \\sqrt { 2 }": ROOT_18,
    "30": THIRTY,
    "1250": [
        "1,250",
        "1 250",
        "1{,}250",
        "1\\,250",
        "1,\\!250",
        "1250.00",
        "1.25e3",
        "1.25 \\times 10^3",
    ],
    "7425000": ["7,425,000", "7 425 000", "7.425e6"],
    "\\frac{11}{4}": [
        "22/8",
        "2.75",
        "2,75",
        "2\\frac{3}{4}",
        "2 \\frac34",
        "2 3/4",
        "11 / 4",
        "\\tfrac{11}{4}",
        "2¾",
    ],
    "3": ["\\dfrac{6}{2}", "6/2", "3.0", "\\frac { 6 } { 2 }"],
    "22 / 3": ["\\frac{22}{3}", "7\\frac{1}{3}", "7.3333333333"],
    "\\frac { 17 } { 2 } \\sqrt { 3 }": [
        "8.5\\sqrt{3}",
        "\\frac{17\\sqrt{3}}{2}",
        "17√3/2",
        "17*sqrt(3)/2",
        "\\frac{17}{2}\\sqrt3",
    ],
    "\\frac{5\\pi}{3}": [
        "5*pi/3",
        "5π/3",
        "\\frac{5}{3}\\pi",
        "1\\frac{2}{3}\\pi",
        "(5/3)\\pi",
        "5.235987755982989",
    ],
    "12\\sqrt{2}": ["12√2", "12\\sqrt2", "12 √(2)", "12\\cdot\\sqrt{2}", "6×2√2"],
    "-2\\frac{3}{4}": ["-2.75", "−2.75", "-11/4", "-\\frac{11}{4}", "\\frac{-11}{4}"],
    "0": ["0", "0.0", "-0", "\\sqrt{2}-\\sqrt{2}", "x = 0", "\\boxed{0}", "\\sin(180^\\circ)"],
    "60": ["60^\\circ", "60°", "60\\degree", "60 degrees", "60 \\text{ degrees}"],
}


@pytest.mark.parametrize(
    ("reference", "prediction"), [(r, p) for r, forms in FORMS.items() for p in forms]
)
def test_every_form_of_a_value_matches(reference: str, prediction: str) -> None:
    verdict = grade(prediction, reference)
    assert verdict.match, verdict


@pytest.mark.parametrize(
    ("reference", "prediction"), [(r, p) for r, forms in FORMS.items() for p in forms]
)
def test_no_form_of_a_value_matches_another_value(reference: str, prediction: str) -> None:
    for other in FORMS:
        if other != reference:
            assert not answers_match(prediction, other), other


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("7\\sqrt(5)", "7"),
        ("6\\sqrt(3)", "6"),
        ("60^{\\circ} C", "60"),
        ("\\pm 13", "13"),
        ("1-\\frac{1}{e}", "1+\\frac{1}{e}"),
        ("\\frac{1}{2^{80}}", "\\frac{1}{2^{81}}"),
        ("1/900!", "1/902!"),
        ("5.001", "5"),
        ("AZYUK2A", "2"),
        ("4x + 12 = 40", "40"),
        ("2x = 5", "5"),
        ("x^2 = 5", "5"),
        ("x > 5", "5"),
        ("\\boxed{5 or 7}", "7"),
        ("\\boxed{5, 7}", "7"),
        ("\\boxed{x}", "5"),
        ("\\boxed{}", "5"),
        ("", "5"),
        ("5", ""),
        ("\\boxed{5i}", "5"),
        ("1/0", "0"),
        ("0/0", "0"),
        ("\\sqrt{-4}", "2"),
        ("12", "1"),
        ("0.35", "35\\%"),
        ("49.1", "49.0"),
    ],
)
def test_different_answers_do_not_match(prediction: str, reference: str) -> None:
    verdict = grade(prediction, reference)
    assert not verdict.match, verdict


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{3} and later \\boxed{4}", "4"),
        ("\\boxed{8} because \\boxed{", "8"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("**Final Answer** \\boxed{512}", "512"),
        ("text \\fbox{5}", "5"),
        ("<answer> 84 </answer>", "84"),
        ("Final Answer: **41**", "41"),
        ("First 3, then 4. The answer is 12√2.", "12√2"),
        ("The answer is 5 because 2 + 4 is 6.", "5"),
        ("The angle is [90].", "90"),
        ("so $x = 3$ and we are done", "x = 3"),
        ("Thus x is 5π/3.", "5π/3"),
        ("it costs 1,000.99m²", "1,000.99m²"),
        ("3 \\sqrt { 2 }", "3 \\sqrt { 2 }"),
        ("The answer: D, not A", "D"),
        ("see figure", None),
        ("", None),
        ("\\boxed{8", None),
        ("<think>\\boxed{8}", None),
        ("<think>\\boxed{8}</think>It is \\boxed{9}.", "9"),
        ('<tool_call>{"name": "calc_score", "arguments": {"answer": "8"}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"answer": "\\\\boxed{8}"}}</tool_call> so 9', "9"),
    ],
)
def test_the_answer_is_found_where_it_stands(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_a_later_unclosed_box_hides_nothing_and_is_flagged() -> None:
    verdict = grade("\\boxed{8} because \\boxed{", "8")
    assert (verdict.match, verdict.is_malformed, verdict.answer) == (True, True, "8")
    assert grade("\\boxed{8", "8").is_malformed
    assert not grade("\\boxed{8", "8").match
    assert not grade("\\boxed{8}", "8").is_malformed


def test_needs_box_reads_boxes_and_answer_tags_only() -> None:
    for text in ("Final Answer: **41**", "41", "$41$"):
        verdict = grade(text, "41", needs_box=True)
        assert (verdict.match, verdict.reason) == (False, "no answer found")
    assert grade("\\boxed{41}", "41", needs_box=True).match
    assert grade("<answer>41</answer>", "41", needs_box=True).match


@pytest.mark.parametrize("exact", ["3\\sqrt{2}", "\\sqrt{18}", "4.242640687119285"])
def test_rounding_reference_counts_an_exact_answer_that_rounds_to_a_decimal_label(
    exact: str,
) -> None:
    for label in ("4.2", "4.24", "4.243"):
        assert answers_match(exact, label)
        assert not answers_match(exact, label, rounding="strict")
    for label in ("4.3", "4.25", "4.23", "4"):
        assert not answers_match(exact, label)


def test_rounding_never_works_from_decimals_or_towards_integers() -> None:
    assert not answers_match("18.79", "18.8"), "two roundings of a value need not be the same value"
    assert not answers_match("4.2", "4.24")
    assert not answers_match("4.24", "3\\sqrt{2}")
    assert not answers_match("\\sqrt{17}", "4")
    assert answers_match("49", "49.0", rounding="strict")
    assert answers_match("\\frac{25}{2}", "12.5", rounding="strict")


def test_a_tie_rounds_either_way() -> None:
    assert answers_match("\\frac{1}{8}", "0.12")
    assert answers_match("\\frac{1}{8}", "0.13")


def test_a_long_decimal_stands_for_the_exact_value_in_both_policies() -> None:
    for rounding in ("reference", "strict"):
        assert answers_match("5.385164807134504", "\\sqrt{29}", rounding=rounding)
        assert answers_match("0.0833333333333333", "\\frac{1}{12}", rounding=rounding)
        assert not answers_match("5.385164807134514", "\\sqrt{29}", rounding=rounding)
        assert not answers_match("5.39", "\\sqrt{29}", rounding=rounding)
        assert not answers_match("5.00000001", "5", rounding=rounding)


def test_tolerance_is_relative_to_the_reference() -> None:
    assert answers_match("5.39", "\\sqrt{29}", tolerance=0.001)
    assert not answers_match("5.4", "\\sqrt{29}", tolerance=0.001)
    assert answers_match("5.4", "\\sqrt{29}", tolerance=0.01)
    assert answers_match("1010", "1000", tolerance=0.01)
    assert not answers_match("1011", "1000", tolerance=0.01)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("\\boxed{30}", "12 and 30", False),
        ("\\boxed{12, 30}", "12 and 30", True),
        ("\\boxed{30, 12}", "12 and 30", True),
        ("\\boxed{12, 30, 30}", "12 and 30", True),
        ("\\boxed{12} and \\boxed{30}", "12, 30", True),
        ("\\boxed{12, 31}", "12 and 30", False),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("(1, 2)", "(1, \\frac{4}{2})", True),
        ("(2, 1)", "(1, 2)", False),
        ("(1, 2]", "(1, 2)", False),
        ("1 \\pm \\sqrt{19}", "\\{1-\\sqrt{19}, 1+\\sqrt{19}\\}", True),
        ("13", "\\pm 13", False),
        ("(p, q) = (3, 2)", "(3,2)", True),
        ("AB = 4, CD = 5", "4, 5", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x", "(x+1)^2", False),
        ("x \\geq 5", "x >= 5", True),
        ("\\text{E}", "E", True),
        ("(C)", "C", True),
        ("D", "(D) Alina", True),
        ("C", "(A) Cecile", False),
        ("\\mathrm{E}*2", "E", False),
        ("odd", "\\text{odd}", True),
    ],
)
def test_collections_expressions_and_choices(
    prediction: str, reference: str, expected: bool
) -> None:
    verdict = grade(prediction, reference)
    assert verdict.match is expected, verdict


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("\\dfrac{9}{7}", "\\dfrac{9}{7}"),
        ("\\sqrt{2}", "\\sqrt{2}"),
        (" 004 ", "004"),
        ("$35\\%$", "$35\\%$"),
        ("so \\boxed{5}.", "5"),
        ("C", "C"),
        ("x+1", "x+1"),
        ("12 and 30", "12 and 30"),
        ("0", "0"),
    ],
)
def test_a_label_that_can_be_an_answer_is_kept_and_matches_itself(label: str, answer: str) -> None:
    assert parse_reference(label) == answer
    assert answers_match(answer, label)


@pytest.mark.parametrize(
    "label", ["", "  ", "see figure", "$x$", "the length of AB", "\\boxed{", "1/0"]
)
def test_a_label_that_cannot_be_an_answer_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        parse_reference(label)


# -- several answers, several forms (cases of the kinds of MATH-10 to MATH-28) ------------------------------------


@pytest.mark.parametrize(
    "prediction",
    [
        "\\boxed{x = 3, y = 4}",
        "\\boxed{x=3 \\text{ or } x=4}",
        "\\boxed{x=3 \\text{ and } y=4}",
        "\\boxed{x=3;\\ y=4}",
        "\\boxed{AB = 3, BC = 4}",
        "\\boxed{x=1, x=2, x=3, x=4}",
        "\\boxed{x=3\\\\ y=4}",
        "\\boxed{x=3\\\\y=4}",
        "\\boxed{x_1 = 3 \\\\[2pt] x_2 = 4}",
        "\\boxed{x=3\\quad y=4}",
        "\\boxed{m\\angle A = 3 \\qquad m\\angle B = 4}",
        "\\boxed{x=3\n y=4}",
        "\\boxed{\\begin{cases}x=3\\\\y=4\\end{cases}}",
        "x = 3, y = 4",
    ],
)
def test_the_last_of_several_assignments_is_not_the_answer(prediction: str):
    """The kind of huggingface/Math-Verify#47 and #14 (`n=2,3,4`): who lists values has not named one."""
    assert not answers_match(prediction, "4")


def test_several_assignments_are_their_values():
    assert answers_match("\\boxed{x = 3, y = 4}", "3, 4")
    assert answers_match("\\boxed{x_1 = 4 \\text{ and } x_2 = 3}", "3 and 4")
    assert not answers_match("\\boxed{n=2, 3, 4}", "n=1, 2, 3")
    assert answers_match("\\boxed{x = 1,250}", "1250"), "the comma of a thousand separates nothing"
    assert answers_match("\\boxed{x = 4 \\\\ y = 3}", "4, 3")
    assert answers_match("\\boxed{12\\ cm}", "12"), "nor a space"
    assert answers_match("\\boxed{\\\\frac{1}{2}}", "1/2"), "nor a doubled backslash"
    assert answers_match("\\boxed{f(3, 4) = 7}", "7"), "nor does one in brackets"


@pytest.mark.parametrize(
    ("prediction", "reference", "is_match"),
    [
        ("12 = x", "12", True),
        ("1,250 = AB", "1250", True),
        ("A = \\pi r^2 = 25\\pi", "25\\pi", True),
        ("\\text{Perimeter} = 3 + 4 + 5 = 12", "12", True),
        ("|AB| = 3", "3", True),
        ("y\\text{-intercept} = 4", "4", True),
        ("\\sin A = \\frac{3}{5}", "0.6", True),
        # equations of which the right side is not the value of anything that was asked for
        ("x - 1 = 5", "5", False),
        ("-x = 5", "5", False),
        ("\\sqrt{x} = 5", "5", False),
        ("|x| = 5", "5", False),
        ("x^2 = 5", "5", False),
        ("2x = 10 = y", "10", False),
    ],
)
def test_an_equation_says_a_value_where_one_side_is_a_name(
    prediction: str, reference: str, is_match: bool
):
    assert answers_match(f"\\boxed{{{prediction}}}", reference) == is_match


@pytest.mark.parametrize(
    "prediction",
    [
        "\\boxed{B}", "\\boxed{(B)}", "\\boxed{B.}", "\\boxed{B. 30}", "\\boxed{B) 30}", "\\boxed{\\textbf{(B)}\\ 30}",
        "\\boxed{Option B}", "\\boxed{B: A line}", "\\boxed{B Berlin}", "\\boxed{\\text{(B) } 30^\\circ}",
        "The answer is B.", "The answer is (B) 30.", "The answer is B. Option A is wrong, and C too.",
    ],
)  # fmt: skip
def test_a_choice_may_carry_its_text(prediction: str):
    """NVIDIA-NeMo/Gym#1844."""
    assert answers_match(prediction, "B")
    assert not answers_match(prediction, "A")


@pytest.mark.parametrize(
    "prediction",
    [
        "\\boxed{A or B}", "\\boxed{A, B}", "\\boxed{A/B/C/D}", "\\boxed{(A) and (B)}", "Answer: A or B",
        "The answer is A, B, C or D", "The answer is (A) and (B).",
    ],
)  # fmt: skip
@pytest.mark.parametrize("reference", ["A", "B"])
def test_several_choices_are_none(prediction: str, reference: str):
    assert not answers_match(prediction, reference)


@pytest.mark.parametrize(
    ("written", "fraction"),
    [
        ("0.\\overline{3}", "\\frac{1}{3}"),
        ("0.1\\overline{6}", "\\frac{1}{6}"),
        ("-1.\\bar{3}", "-\\frac{4}{3}"),
        ("0.\\dot{3}", "\\frac{1}{3}"),
        ("0.\\overline{142857}", "\\frac{1}{7}"),
        ("2.\\overline{9}", "3"),
    ],
)
def test_a_repeating_decimal_is_its_fraction(written: str, fraction: str):
    assert answers_match(f"\\boxed{{{written}}}", fraction)
    assert answers_match(f"\\boxed{{{fraction}}}", written)
    assert not answers_match("\\boxed{0.333}", "0.\\overline{3}")
    assert not answers_match("\\boxed{0.\\overline{" + "9" * 3000 + "}}", "1"), (
        "too long to be read"
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        "\\mathbf{\\frac{1}{2}}", "\\boldsymbol{\\dfrac{1}{2}}", "\\underline{\\frac12}", "\\color{blue}{\\frac12}",
        "\\color{blue}\\frac12", "\\textcolor{red}{0.5}", "\\Large\\frac12", "\\left\\lvert -\\frac12\\right\\rvert",
        "\\lvert -0.5\\rvert", "\\texttt{0.5}",
    ],
)  # fmt: skip
def test_fonts_sizes_and_colours_are_no_part_of_a_value(wrapped: str):
    assert answers_match(f"\\boxed{{{wrapped}}}", "\\frac{1}{2}")
