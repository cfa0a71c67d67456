"""The verdict on one reply: find the answer, compare it, say why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyturn.grading import clean, extract, values
from polyturn.grading.compare import Policy, same_value
from polyturn.grading.numbers import NotANumberError
from polyturn.grading.values import Value

_CHOICE = re.compile(r"^\(?([A-H])\)?(?:[.):]?\s+\S.*)?$", re.DOTALL)
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
    if found.answer is None:
        if needs_box or found.is_malformed or len(prediction) > extract.MAX_ANSWER:
            return Verdict(False, "no answer found", None, found.is_malformed)
        answers = [prediction]
    else:
        answers = (
            [found.answer]
            if found.source in ("box", "tag") or len(prediction) > extract.MAX_ANSWER
            else [prediction, found.answer]
        )
    if len(found.joined) > 1:
        answers.append(", ".join(found.joined))
    reason = "different"
    for answer in answers:
        matched, reason = _compare(answer, expected, policy)
        if matched:
            return Verdict(True, reason, found.answer or prediction.strip(), found.is_malformed)
    return Verdict(False, reason, found.answer, found.is_malformed)


def reference_text(reference: str) -> str:
    """The answer that a label says: the content of its boxes, else the label itself."""
    boxes, _ = extract.boxes_in(reference)
    return ", ".join(extract.joined(reference, boxes)) if boxes else reference.strip()


def _compare(answer: str, expected: str, policy: Policy) -> tuple[bool, str]:
    """Cheap checks first: text, choice letter, value."""
    if not expected:
        return False, "the reference is empty"
    if answer.strip() == expected:
        return True, "same text"
    reference, prediction = _value(expected), _value(answer)
    if reference is not None:
        if prediction is None:
            return False, "the prediction is no value"
        reason = same_value(prediction, reference, policy) or _as_collections(
            answer, expected, policy
        )
        return reason is not None, reason or "different values"
    return _same_words(answer, expected)


def _as_collections(answer: str, expected: str, policy: Policy) -> str | None:
    """`1,2` is a decimal or a list; where one side is a list, the other is read as one too."""
    pair = values.read_collection(answer), values.read_collection(expected)
    return same_value(pair[0], pair[1], policy) if pair[0] and pair[1] else None


def _value(text: str) -> Value | None:
    try:
        return values.read(text)
    except NotANumberError:
        return None


def _same_words(answer: str, expected: str) -> tuple[bool, str]:
    left, right = (_words(text) for text in (answer, expected))
    if left and left == right:
        return True, "same text"
    choices = _CHOICE.match(left), _CHOICE.match(right)
    if choices[0] and choices[1] and min(len(left.strip("()")), len(right.strip("()"))) == 1:
        return choices[0].group(1) == choices[1].group(1), "choice letter"
    return False, "different"


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
    if _value(label) is not None or re.fullmatch(r"\(?[A-H]\)?", _words(label)):
        return label
    shown = _words(label)
    without_commands = re.sub(r"\\[A-Za-z]+", " ", shown)
    if not re.search(r"\d|\\pi|\\infty", shown) or _LABEL_WORD.search(without_commands):
        raise ValueError(f"the answer {text[:80]!r} is no value that can be graded")
    return label
