"""The verdict on one reply: find the answer, compare it, say why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyturn.grading import clean, extract, intervals, symbolic, values
from polyturn.grading.compare import Policy, same_value
from polyturn.grading.numbers import NotANumberError, Number, RefusedError
from polyturn.grading.values import Value

# A letter, alone or with the text of its choice: `B`, `(B) 30`, `B. 30`, `E: A line`, `Option B`, `B Berlin`.
_CHOICE = re.compile(
    r"^(?:(?i:option|choice|answer)\s*:?\s*)?\(?([A-H])(?:\)[.:]?.*|[.:](?:\s.*)?|\s+[A-Za-z]{2,}.*)?$",
    re.DOTALL,
)
# The same where the reference is a letter: nothing else is meant by `b`, `(b)` or `b. 30` then.
_SMALL_CHOICE = re.compile(r"^\(?([a-h])(?:\)[.:]?.*|[.:](?:\s.*)?)?$", re.DOTALL)
_ELLIPSIS = re.compile(r"\\[lc]?dots|…|\.\.\.")
_FORMULA = re.compile(r"[\d=<>+^&]|\\[A-Za-z]|\b[A-Za-z]\b")
_LABEL_FORMULA = re.compile(r"[=<>]|\\(?:infty|cup|cap|begin|leq?|geq?|neq?|pm|in)(?![A-Za-z])")
_LABEL_WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Verdict:
    """Whether a prediction counts as the reference, and why.

    `answer` is what was found in the prediction; `is_malformed` tells that the reply ends in a box that is never
    closed; `failure` names what went wrong in the grader itself (then `match` is False).
    """

    match: bool
    reason: str
    answer: str | None = None
    is_malformed: bool = False
    failure: str | None = None


def grade(prediction: str, reference: str, policy: Policy, *, needs_box: bool = False) -> Verdict:
    """Grade a reply (or a bare answer) against a reference."""
    expected = reference_text(reference)
    found = extract.extract(prediction, needs_box=needs_box)
    outcome = _Outcome(False, "no answer found")
    candidates = _candidates(prediction, found, needs_box=needs_box)
    if found.source == "box" and not needs_box and _is_letter(expected):
        candidates += _stated_choice(prediction, found.answer or "")
    for answer in candidates:
        outcome = _compare(answer, expected, policy)
        if outcome.match or outcome.failure:
            break
    return Verdict(outcome.match, outcome.reason, found.answer, found.is_malformed, outcome.failure)


def _candidates(prediction: str, found: extract.Extraction, *, needs_box: bool) -> list[str]:
    """What is compared: a box alone; without one, a short text as a whole and then the answer found in it."""
    if found.source in ("box", "tag"):
        joined = [", ".join(found.joined)] if len(found.joined) > 1 else []
        return [found.answer or "", *joined]
    is_short = len(prediction) <= extract.MAX_ANSWER and not extract.has_clauses(prediction)
    is_bare = is_short and not needs_box and not found.is_malformed
    return list(
        dict.fromkeys(
            [*([prediction] if is_bare else []), *([found.answer] if found.answer else [])]
        )
    )


def _stated_choice(prediction: str, boxed: str) -> list[str]:
    """What "Answer: D" says besides a box that makes no choice: a formula on the way."""
    if _choice(_words(boxed)) or _small_choice(_words(boxed)):
        return []
    stated = extract.stated(prediction)
    return [stated] if stated is not None else []


@dataclass(frozen=True)
class _Outcome:
    match: bool
    reason: str
    failure: str | None = None


def reference_text(reference: str) -> str:
    """The answer that a label says: the content of its boxes, else the label itself."""
    boxes, _ = extract.boxes_in(reference)
    return ", ".join(extract.joined(reference, boxes)) if boxes else reference.strip()


def _compare(answer: str, expected: str, policy: Policy) -> _Outcome:
    """Cheap checks first: text, value, choice letter; symbolic work only where neither side is settled by them."""
    if not expected:
        return _Outcome(False, "the reference is empty")
    if answer.strip() == expected:
        return _Outcome(True, "same text")
    reference = _value(expected)
    try:
        prediction = values.read(answer)
    except RefusedError as error:
        return _Outcome(False, str(error))
    except NotANumberError:
        prediction = None
    if reference is not None and prediction is not None:
        return _compare_values((answer, prediction), (expected, reference), policy)
    if isinstance(reference, Number):
        return _Outcome(False, "the prediction is no number")
    if (is_same := intervals.same(answer, expected, policy)) is not None:
        return _Outcome(is_same, f"{'equal' if is_same else 'different'} intervals")
    return _compare_words(answer, expected) or _symbolic(answer, expected, policy)


def _compare_values(
    prediction: tuple[str, Value], reference: tuple[str, Value], policy: Policy
) -> _Outcome:
    """Two values, each with its text; where both name the same variables, each has its own value."""
    named = values.assignments(prediction[0]), values.assignments(reference[0])
    if named[0] and named[1] and named[0].keys() == named[1].keys():
        pairs = [(named[0][name], named[1][name]) for name in named[1]]
        is_same = all(same_value(own, other, policy) for own, other in pairs)
        return _Outcome(is_same, f"{'equal' if is_same else 'different'} values of the variables")
    reason = same_value(prediction[1], reference[1], policy) or _as_collections(
        prediction[0], reference[0], policy
    )
    return _Outcome(reason is not None, reason or "different values")


def _compare_words(answer: str, expected: str) -> _Outcome | None:
    """Equal text, or choice letters; None where a formula must decide."""
    words = _words(answer), _words(expected)
    if words[0] and words[0] == words[1]:
        return _Outcome(True, "same text")
    choices = _choice(words[0]), _choice(words[1])
    if _is_letter(words[1]) and not choices[0]:
        choices = _small_choice(words[0]), choices[1]
    if choices[0] and choices[1] and min(map(len, words)) == 1:
        is_same = choices[0] == choices[1]
        return _Outcome(is_same, f"{'same' if is_same else 'different'} choice letter")
    return _Outcome(False, "no choice letter") if choices[1] else None


def _choice(words: str) -> str | None:
    """The letter of the one choice that a text makes; None where it makes none, or several."""
    found = _CHOICE.match(words)
    return found.group(1) if found and not extract.is_one_of_several(words, found) else None


def _small_choice(words: str) -> str | None:
    found = _SMALL_CHOICE.match(words)
    return found.group(1).upper() if found else None


def _is_letter(text: str) -> bool:
    return bool(re.fullmatch(r"\(?[A-H]\)?", text))


def _symbolic(answer: str, expected: str, policy: Policy) -> _Outcome:
    if max(len(answer), len(expected)) > clean.MAX_CHARACTERS:
        return _Outcome(False, "the answer is too long")
    if not _FORMULA.search(expected) or not _FORMULA.search(answer):
        return _Outcome(False, "different words")
    if _ELLIPSIS.search(answer) or _ELLIPSIS.search(expected):
        return _Outcome(False, "different text")  # math-verify reads no further than the dots
    result = symbolic.compare(clean.for_sympy(answer), clean.for_sympy(expected), policy.timeout_s)
    reason = result.failure or ("symbolically equal" if result.match else "symbolically different")
    return _Outcome(result.match, reason, result.failure)


def _as_collections(answer: str, expected: str, policy: Policy) -> str | None:
    """`1,2` is a decimal or a list; where one side is a list, the other is read as one too."""
    pair = values.read_collection(answer), values.read_collection(expected)
    return same_value(pair[0], pair[1], policy) if pair[0] and pair[1] else None


def _value(text: str) -> Value | None:
    try:
        return values.read(text)
    except NotANumberError:
        return None


def _words(text: str) -> str:
    try:
        shown = clean.trim(clean.plain(text))
    except clean.TooLongError:
        return ""
    return shown[1:-1].strip() if re.fullmatch(r"\([^()]*\)", shown) else shown


def parse_reference(text: str) -> str:
    """The answer of a label, ready to be a Problem.answer.

    Raises:
        ValueError: it cannot be an answer: empty, prose, or a bare variable.
    """
    label = reference_text(text)
    if not label:
        raise ValueError("the answer is empty")
    if _value(label) is not None or _is_letter(_words(label)):
        return label
    shown = _words(label)
    without_commands = re.sub(r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+", " ", shown)
    is_formula = bool(_LABEL_FORMULA.search(shown)) or bool(re.search("[A-Za-z]", without_commands))
    # A number, or something that is done with variables: not `x` alone, nor N/A.
    has_value = bool(
        re.search(r"\d|\\(?:pi|infty|sin|cos|tan|frac|sqrt)(?![A-Za-z])|\S\s*[-+*^]\s*\S", shown)
    )
    if not (is_formula and has_value) or _LABEL_WORD.search(without_commands):
        raise ValueError(f"the answer {text[:80]!r} is no value that can be graded")
    return label
