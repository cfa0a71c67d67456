"""What users of other graders reported, by kind: forms that were not understood, and answers that were not told apart."""

from __future__ import annotations

import pytest

from polyturn.reward import answers_match, extract_answer, grade, parse_reference

# (what is written, what equals it, what does not)
INTERVALS = [
    ("(0, 12.5)", ["0 < x < 12.5", "12.5 > x > 0", "0 \\lt x \\lt \\frac{25}{2}", "x \\in (0, 12.5)",
                    "x > 0 \\text{ and } x < 12.5", "x < 12.5, 0 < x"],
     ["x > 0 \\text{ and } y < 12.5", "x > 0, x > 12.5", "x > 0 \\text{ or } x < 12.5", "0 \\leq x < 12.5", "0 < x < 12", "[0, 12.5)", "x < 12.5"]),
    ("x < 3", ["(-\\infty, 3)", "3 > x", "x \\in (-\\infty,3)", "x<3.0"], ["x \\leq 3", "x > 3", "(-\\infty, 3]", "y < 3"]),
    ("x > 1,250", ["(1250, \\infty)"], ["x > 1"]),
    ("[2, \\infty)", ["x \\geq 2", "2 \\le x", "x ≥ 2", "x >= 2"], ["x > 2", "(2, \\infty)", "x \\leq 2"]),
    ("x < -1 \\text{ or } x > 5", ["(-\\infty, -1) \\cup (5, \\infty)", "x > 5 or x < -1"],
     ["(-\\infty, -1) \\cup [5, \\infty)", "x < -1", "-1 < x < 5"]),
    ("-2 \\le x \\le 7", ["x \\in [-2,7]", "[-2, 7]", "7 \\geqslant x \\geqslant -2"], ["(-2, 7)"]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "equal", "other"), INTERVALS)
def test_an_interval_and_a_solved_inequality_are_one_set(
    one: str, equal: list[str], other: list[str]
) -> None:
    """huggingface/Math-Verify#10, #71: equal only in one order of the two."""
    for text in equal:
        for pair in ((text, one), (one, text)):
            assert answers_match(f"\\boxed{{{pair[0]}}}", pair[1]), pair
    for text in other:
        for pair in ((text, one), (one, text)):
            assert not answers_match(f"\\boxed{{{pair[0]}}}", pair[1]), pair


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("1, 3, 5, \\ldots, 2n-1", "1, 2, \\ldots, n"),
        ("1:4:9:\\ldots", "1:2:3:\\ldots"),
        ("1 + 2 + \\cdots + n", "1 + 3 + \\cdots + n"),
    ],
)
def test_what_stands_behind_dots_is_compared_too(prediction: str, reference: str) -> None:
    """huggingface/Math-Verify#14."""
    assert not answers_match(f"\\boxed{{{prediction}}}", reference)
    assert answers_match(f"\\boxed{{{reference}}}", reference)


def test_each_variable_has_its_own_value() -> None:
    for right in ("x = 5, y = 12", "y = 12 \\text{ and } x = 5", "5, 12"):
        assert answers_match(f"\\boxed{{{right}}}", "x = 5, y = 12"), right
    for wrong in ("x = 12, y = 5", "y = 5; x = 12", "x = 5, y = 13"):
        assert not answers_match(f"\\boxed{{{wrong}}}", "x = 5, y = 12"), wrong
    assert answers_match("\\boxed{x = -5, x = 5}", "x = 5, x = -5"), "two values of one variable"
    assert answers_match(
        "\\boxed{m\\angle A = 40, m\\angle B = 50}", "\\angle A = 40, \\angle B = 50"
    )


@pytest.mark.parametrize(
    ("prediction", "reference", "is_match"),
    [
        ("2 2/3", "\\frac{8}{3}", True),
        ("-1 1/4", "-1.25", True),
        ("2 2/3", "2", False),
        ("4 10/3", "10", False),
        ("4 10/3", "\\frac{22}{3}", False),
        ("4 3/0", "4", False),
    ],
)
def test_a_mixed_number_has_a_proper_fraction(
    prediction: str, reference: str, is_match: bool
) -> None:
    """huggingface/Math-Verify#81: parts of what is no mixed number matched labels."""
    assert answers_match(f"\\boxed{{{prediction}}}", reference) == is_match


@pytest.mark.parametrize(
    "fraction",
    ["{5 \\over 2}", "5 \\over 2", "x = {5 \\over 2}", "{5 \\over {2}}", "{\\sqrt{25} \\over 2}", "\\frac 5 2", "\\frac52"],
)  # fmt: skip
def test_fractions_of_plain_tex_are_fractions(fraction: str) -> None:
    """OrangeX4/Latex-Sympy-Calculator#14, augustt198/latex2sympy#46."""
    assert answers_match(f"\\boxed{{{fraction}}}", "\\frac{5}{2}")
    assert not answers_match(f"\\boxed{{{fraction}}}", "5")
    assert not answers_match(f"\\boxed{{{fraction}}}", "2")


def test_letters_in_fractions_of_plain_tex() -> None:
    assert answers_match("\\boxed{\\frac a b}", "\\frac{a}{b}")
    assert answers_match("\\boxed{a+1 \\over b}", "\\frac{a+1}{b}")
    assert not answers_match("\\boxed{\\frac a b}", "\\frac{b}{a}")


@pytest.mark.parametrize(
    "written", ["30^\\circ 30'", "30°30'", "30° 30′", "30^\\circ 30^\\prime", "30°30'0''"]
)
def test_minutes_are_part_of_an_angle(written: str) -> None:
    assert answers_match(f"\\boxed{{{written}}}", "30.5")
    assert answers_match(written, "30.5^\\circ")
    assert not answers_match(f"\\boxed{{{written}}}", "30")
    assert answers_match("\\boxed{5'}", "5"), "feet"


@pytest.mark.parametrize(
    ("prediction", "reference", "is_match"),
    [
        ("5:13", "\\frac{5}{13}", True),
        ("5 : 13", "5:13", True),
        ("5 \\colon 13", "5:13", True),
        ("5 \\text{ to } 13", "5:13", True),
        ("10:26", "5:13", True),
        ("1:\\sqrt{3}", "\\frac{\\sqrt{3}}{3}", True),
        ("6:8:10", "3:4:5", True),
        ("2:\\sqrt{3}:1", "1:\\sqrt{3}:2", False),
        ("13:5", "5:13", False),
        ("3:4:6", "3:4:5", False),
        ("3:4", "3:4:5", False),
        ("5:0", "5", False),
        ("12:00", "1:00", False),
    ],
)
def test_a_ratio_is_its_quotient(prediction: str, reference: str, is_match: bool) -> None:
    """huggingface/Math-Verify#14 (12:00 and 1:00)."""
    assert answers_match(f"\\boxed{{{prediction}}}", reference) == is_match


def test_ratios_are_labels_and_found_in_text() -> None:
    assert parse_reference("5:13") == "5:13"
    assert parse_reference("3:4:5") == "3:4:5"
    assert answers_match(
        "Both triangles are similar, and their areas are in the ratio 5:13.", "5:13"
    )
    assert answers_match("Angle 1: 30", "30"), "the number of an angle is no term of a ratio"


@pytest.mark.parametrize(
    "remark",
    ["(degrees)", "\\text{ (degrees)}", "(approximately)", "\\text{ (option B)}", "\\mathrm{cm^{3}}", "\\text{ (cubic cm)}",
     " m/s", "\\frac{\\text{m}}{\\text{s}}", "\\; (\\approx 60.0)", "\\text{ or approximately } 60.0", "\\mathrm{~cm}^{3}"],
)  # fmt: skip
def test_a_remark_or_a_unit_behind_a_value_is_no_part_of_it(remark: str) -> None:
    assert answers_match(f"\\boxed{{60{remark}}}", "60")
    assert answers_match(f"\\boxed{{60\\pi{remark}}}", "60\\pi")
    assert not answers_match(f"\\boxed{{60{remark}}}", "60\\pi")


def test_brackets_with_a_factor_are_no_remark() -> None:
    for product in ("60(x)", "60(sin x)", "60(pi)", "60(AB)", "60(2)"):
        assert not answers_match(f"\\boxed{{{product}}}", "60"), product


def test_a_solution_set_of_one_number_is_the_number() -> None:
    assert answers_match("\\boxed{\\{5\\}}", "5")
    assert answers_match("\\boxed{5}", "\\{5\\}")
    assert not answers_match("\\boxed{\\{5, 6\\}}", "5")
    assert answers_match("\\boxed{\\varnothing}", "\\emptyset")


@pytest.mark.parametrize(
    "text",
    [
        "The length is $8\\sqrt{3} \\approx 13.86$ units.",
        "The length is $8\\sqrt{3}$ (approximately 13.86).",
        "\\boxed{8\\sqrt{3} \\text{ or } 13.86}",
        "\\boxed{13.86 \\text{ or } 8\\sqrt{3}}",
        "\\boxed{8\\sqrt{3} \\text{ (about 13.86)}}",
        "x = 8√3 ≈ 13.86",
    ],
)
def test_the_exact_value_counts_where_its_rounding_stands_beside_it(text: str) -> None:
    assert answers_match(text, "8 \\sqrt { 3 }")
    assert not answers_match(text, "8 \\sqrt { 2 }")


def test_two_values_are_not_one_because_they_are_near() -> None:
    for text in ("24 or 25", "8\\sqrt{3} or 13.87", "4.2 or 4.24", "8\\sqrt{3}, 24"):
        assert not answers_match(f"\\boxed{{{text}}}", "8\\sqrt{3}"), text
        assert not answers_match(f"\\boxed{{{text}}}", "24"), text
    assert answers_match("\\boxed{24 (not 25)}", "24")


@pytest.mark.parametrize("label", ["p - q", "\\sqrt{x}", "\\frac { a } { b }", "a^n", "r \\cdot s"])
def test_a_label_of_variables_alone_can_be_graded(label: str) -> None:
    assert parse_reference(label) == label
    assert answers_match(f"\\boxed{{{label}}}", label)
    assert not answers_match("\\boxed{q - p}", label)


@pytest.mark.parametrize(
    "label", ["N/A", "$x$", "x", "see-figure", "AB", "-", "no solution", "A B"]
)
def test_a_label_that_does_nothing_is_none(label: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        parse_reference(label)


def test_a_label_may_be_a_vector() -> None:
    label = "\\begin{pmatrix} -2 \\\\ 4 \\end{pmatrix}"
    assert parse_reference(label) == label
    assert answers_match("\\boxed{\\begin{pmatrix}-2\\\\\\frac{8}{2}\\end{pmatrix}}", label)
    assert not answers_match("\\boxed{\\begin{pmatrix}-2\\\\5\\end{pmatrix}}", label)


@pytest.mark.parametrize(
    "text",
    [
        "The hypotenuse is 25, because 7² + 24² = 625.",
        "x = 25, since 7^2 + 24^2 = 625",
        "**x = 25**\n\nCheck: 7^2 + 24^2 = 25^2",
        "5x = 125\nx = 25",
        "x = 50, so AB = x / 2 = 25",
        "The solution is $x = 50$ and hence $AB = x - 25 = 25$.",
        "By the theorem, $x = \\sqrt{7^2+24^2} = \\sqrt{625} = 25$.",
        "1. Legs are 7 and 24.\n2. Use the theorem.\n3. The hypotenuse is 25.",
    ],
)
def test_the_result_of_a_derivation_is_found(text: str) -> None:
    for value in ("25", "625", "50", "125", "7, 24"):
        assert answers_match(text, value) == (value == "25"), value


@pytest.mark.parametrize(
    "text",
    [
        "Since AB is 12, the area is 24.",
        "The base is 6 and the height is 8, so the area is 24.",
        "With sides 6 and 8, the perimeter is 24",
        "The radius is 3, the height is 4, and the volume is 24.",
        "If x is 12, then y is 24.",
        "It cannot be 12, so it is 24.",
        "x = 24, which is option 2",
    ],
)
def test_the_numbers_of_a_sentence_are_no_list(text: str) -> None:
    assert answers_match(text, "24") == ("option 2" not in text)
    assert not answers_match(text, "12, 24")


@pytest.mark.parametrize(
    "text",
    [
        "So the sides are 12 and 24.",
        "12 and 24",
        "AB = 12, CD = 24",
        "12 cm, 24 cm",
        "The answers are $12$ and $24$",
    ],
)
def test_a_list_in_a_sentence_is_one(text: str) -> None:
    assert answers_match(text, "12, 24")
    assert not answers_match(text, "24")


def test_a_computed_label_is_exact_to_what_a_double_holds() -> None:
    """Labels of float columns: 5/13 is printed as 0.38461538461538464."""
    assert answers_match("\\boxed{\\frac{5}{13}}", str(5 / 13))
    assert answers_match("\\boxed{0.3}", str(0.1 + 0.2))
    assert not answers_match("\\boxed{0.384615384615385}", str(5 / 13 + 1e-13))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (
            "The calculated answer is 11.\n\nAnswer seems to be A.\n\nAnswer: A\n",
            "A",
        ),  # groq/openbench#348
        ("The answer is C because I computed the integral.", "C"),  # jundot/omlx#3668
        ("ANSWER IS D. A is incorrect.", "D"),
        ("I would pick B — a safe choice.", "B"),  # EleutherAI/lm-evaluation-harness#4188
        ("b. 4", "B"),
        ("d", "D"),
        ("\\boxed{(b)}", "B"),
        ("(C) 60", "C"),  # mathllm/MATH-V#3
        ("我認為應該選 A", "A"),  # ai-twinkle/Eval#156
        ("我選擇 B", "B"),
        ("故选 C。", "C"),
        ("正確答案為 A", "A"),
        ("答案是 (D)。", "D"),
        (
            "\\boxed{\\langle H\\rangle \\ll \\Delta E}\n\n**Answer: D**",
            "D",
        ),  # NVIDIA-NeMo/Skills#1526
    ],
)
def test_the_one_choice_that_is_made_is_read(text: str, letter: str) -> None:
    for choice in "ABCDE":
        assert answers_match(text, choice) == (choice == letter), choice


def test_a_box_with_a_choice_outranks_a_stated_one() -> None:
    assert answers_match("\\boxed{B}. Answer: C", "B")
    assert not answers_match("\\boxed{B}. Answer: C", "C")
    assert not grade("\\boxed{x + 1}. Answer: C", "C", needs_box=True).match


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "Mark your solution with \\boxed \nThe answer is 5",
            "5",
        ),  # EleutherAI/lm-evaluation-harness#3477
        ("So x = 7, not 8.", "7"),
        ("We get $x = 7$ rather than $8$.", "x = 7"),
        ("答案：30", "30"),
        ("所以答案是30°。", "30°"),
    ],
)
def test_the_answer_of_a_sentence_is_found(text: str, answer: str) -> None:
    assert extract_answer(text) == answer
