r"""Where the answer stands in a reply.

Order of looking, in the text outside of `<think>` blocks and tool calls: the last complete `\boxed{}` or `\fbox{}`;
`<answer>`; the whole text when it is short and a number; what follows the last "answer is" or "Answer:";
bold text at the end; the last formula; the last number.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

from polyturn.envs.tools import Reply, read_reply
from polyturn.grading import clean, values

TAIL = 8_000  # characters from the end in which an unboxed answer is looked for
MAX_ANSWER = 500  # characters of a text that is an answer as a whole
MAX_LEFT_SIDE = 40  # characters before a number in which an equation is looked for
MAX_JOINED = 20  # boxes that form one list

Source = Literal["box", "tag", "text", "marker", "bold", "end"]

_BRACE = re.compile(r"\\+(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\[{}]|[{}]")
_JOINT = re.compile(r"\}?[^.;:\n]{0,40}?(?:\band\b|\bor\b|,)[^.;:\n]{0,20}|\}?[\s$,]*")
_BARE = re.compile(r"-?(?:\d[\d.,]*|\\[A-Za-z]+\s*(?:\{[^{}]*\}){0,2}|[A-Za-z](?![A-Za-z]))")
_TURN_END = re.compile(r"<\|im_end\|>|<\|im_start\|>user|<\|endoftext\|>")
_MARKER = re.compile(
    r"(?:final\s+answer|\banswer|答案)(?:\s*\*\*)?\s*(?:is\b|[:：=]|是|[为為])\s*(?:\*\*)?\s*(?:the\s+(?:final\s+)?answer\s+is)?([^\n]{1,400})",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    r"(?<=[\d$})°%])\.\s+|(?<=\b[A-H])\.\s+(?=[A-Z])|(?<=[a-z])\.\s+(?=[A-Z])|\bI hope it is correct"
)
_GOES_ON = re.compile(r"\s*(?:[-+*/^=<>(\\√π·×]|(?![mM][\s²³.,^)]|[mM]$)[A-Za-z](?![A-Za-z]))")
_EQUATION = re.compile(r"[<>]\s*$|(?:\d ?[A-Za-z]|[A-Za-z}]\s*[-+*/^]|\^)[^,.;:=\n$]*=\s*$")
_CHAIN = re.compile(r"(?:^|(?<![-+*/^\d])\s|[(,;:])[A-Za-z]{1,3}\s*=[^=,.;\n]*=\s*$")  # AB = 2x =
_LINKS = "and|or|about|approximately|approx|roughly"
_CONCLUSIONS = "so|then|thus|hence|therefore"
# Behind a separator: a conclusion, or words that are neither a link, a function nor the name in an assignment.
_CLAUSE = re.compile(
    rf"(?:[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s+(?:(?:{_LINKS})\s+)*(?:(?:{_CONCLUSIONS})\b|"
    rf"(?!(?:{_LINKS}|{clean.FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{2,}}(?![A-Za-z(]|\s*[=:]))"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
# Why the value before it is the answer, with values of its own.
_REASON = re.compile(r"(?<=\S)[,;]?\s+(?:because|since)\b(?:(?![.!?]\s).)*$", re.DOTALL)
_BOLD = re.compile(r"\*\*\s*([^*\n]{1,100}?)\s*\*\*")
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.{1,1000}?)(?<!\\)\$\$|(?<!\\)\$((?:[^$\\]|\\.){1,1000})\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]",
    re.DOTALL,
)
_TERM = (
    r"(?:(?<![A-Za-z0-9_.])[-−]?\s?(?:\d{1,3}(?:(?:,\\?!?\s?|\{,\})\d{3})+(?!\d)(?:\.\d+)?|\d+[.,]\d+|\.?\d+)"
    r"|[-−]?\\[dt]?frac\s*\{[^{}]{1,60}\}\s*\{[^{}]{1,60}\}|[-−]?\\sqrt\s*(?:\{[^{}]{1,60}\}|\d+)|√\s*\(?\d+\)?"
    r"|\\pi(?![A-Za-z])|π|\bpi\b|sqrt\(\d+\))"
)
_RUN = re.compile(
    rf"{_TERM}(?:(?:\s?(?:[*/·×^]|\\cdot)?\s?|(?<=\d):(?=\d))(?:{_TERM}|(?<=[*/^])\d+))*(?:\s?(?:\\?%|°|\^\\circ))?"
)
# A value that is named only to be denied: "x is 7, not 8".
_DENIED = re.compile(rf"[,;]?\s*\b(?:not|rather than|instead of)\s+\$?(?:{_TERM})\$?")
_LETTER = re.compile(
    r"(?:\bis|'s|\b(?:choose|chose|pick|select|option|choice)|[选選][择擇]?|^)\s*\(?([A-H])\)?(?![A-Za-z'])"
)
_CHOICE = re.compile(r"^\(?([A-E])\)?(?:[.):,\s。，]|$)")
# What follows a letter where it is one of several: "A or B", "A, B and C", "(A) 30 or (B) 40".
_FURTHER_CHOICE = re.compile(
    r"\)?[.:]?\s*(?:[,;/&+]|\band\b|\bor\b)\s*(?:(?:and|or)\s+)?\(?[A-H]\)?(?![A-Za-z'])"
    r"|.*(?:[,;/&+]|\band\b|\bor\b)\s*\([A-H]\)"
)


@dataclass(frozen=True)
class Extraction:
    """The answer as written, where it stood, and whether the reply ends in a box that is never closed.

    `joined` holds the answer and the boxes that are joined to it by "and" or a comma, in order.
    """

    answer: str | None
    source: Source | None
    is_malformed: bool = False
    joined: tuple[str, ...] = ()


def extract(text: str, *, needs_box: bool = False) -> Extraction:
    """Find the answer of an assistant reply; `needs_box` allows only boxes and answer tags."""
    reply = _reply(text)
    if reply.is_thinking:
        return Extraction(None, None)
    visible = reply.text
    boxes, is_malformed = boxes_in(visible)
    if boxes:
        answers = joined(visible, boxes)
        return Extraction(answers[-1], "box", is_malformed, answers)
    head, closing, _ = visible.rpartition("</answer>")
    _, opening, tagged = head.rpartition("<answer>")
    if closing and opening:
        return Extraction(tagged.strip() or None, "tag", is_malformed)
    if is_malformed or needs_box:
        return Extraction(None, None, is_malformed)
    return _unboxed(visible[-TAIL:].strip())


def stated(text: str) -> str | None:
    """What follows the last "answer is" or "Answer:" of a reply; None where there is none."""
    marker = _last(_MARKER, _reply(text).text[-TAIL:])
    return None if marker is None else _in_sentence(marker.group(1))


def _reply(text: str) -> Reply:
    return read_reply(_TURN_END.split(text.removeprefix("<|im_start|>assistant"), maxsplit=1)[0])


@dataclass(frozen=True)
class Box:
    """One complete box of a text: where it starts, and where its content starts and ends."""

    start: int
    content_start: int
    content_end: int


def boxes_in(text: str) -> tuple[list[Box], bool]:
    r"""All complete boxes in the order in which they end, and whether a box that starts after them is never closed.

    One pass, however many braces; `\boxed 5` without braces counts, empty boxes do not.
    """
    if "boxed" not in text and "fbox" not in text:
        return [], False
    found: list[Box] = []
    open_braces: list[
        tuple[int, int] | None
    ] = []  # of a box: its start and where its content starts
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and not _is_blank(text, start[1], match.start()):
                found.append(Box(*start, match.start()))
        elif token.endswith("{") and token != "\\{":
            open_braces.append((match.start(), match.end()))
        elif len(token) > len("\\{") and (bare := _BARE.match(text, match.end())) is not None:
            found.append(Box(match.start(), bare.start(), bare.end()))
    unclosed = max((start[0] for start in open_braces if start is not None), default=-1)
    return found, unclosed > (found[-1].start if found else -1)


def _is_blank(text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is white space; without a copy, for boxes in boxes in boxes."""
    return all(text[position].isspace() for position in range(start, end))


def joined(text: str, boxes: list[Box]) -> tuple[str, ...]:
    r"""The contents of the last box and of those that it is joined to (`\boxed{1} and \boxed{2}`), in order.

    A box in a box counts instead of the outer one.
    """
    answers: list[str] = []
    index, after = len(boxes) - 1, len(text)
    while index >= 0 and len(answers) < MAX_JOINED:
        outer = inner = boxes[index]
        if answers and not _JOINT.fullmatch(text[outer.content_end : after]):
            break
        while index >= 0 and boxes[index].start >= outer.start:
            inner = boxes[index] if boxes[index].start > inner.start else inner
            index -= 1
        answers.append(text[inner.content_start : inner.content_end].strip())
        after = outer.start
    return tuple(reversed(answers))


def _unboxed(text: str) -> Extraction:
    marker = _last(_MARKER, text)
    if marker is not None and (answer := _in_sentence(marker.group(1))) is not None:
        return Extraction(clean.trim(answer), "marker")
    if len(text) <= MAX_ANSWER and is_value(text):
        return Extraction(clean.without_leading_words(clean.trim(text)), "text")
    bold = _last(_BOLD, text)
    if bold is not None and is_value(bold.group(1)):
        return Extraction(bold.group(1), "bold")
    found = _last_formula_or_number(text)
    if found is None and (letter := _last(_LETTER, text)) is not None:
        found = None if is_one_of_several(text, letter) else letter.group(1)
    return Extraction(found, "end" if found else None)


def _last_formula_or_number(text: str) -> str | None:
    """Whichever ends later; a number that is only a part of something (an equation's side, 5x) is none."""
    text = _DENIED.sub("", _REASON.sub("", text))
    formula, number = _last(_FORMULA, text), _last(_RUN, text)
    if formula is not None and (number is None or formula.end() >= number.end()):
        return _content(formula).strip()
    if number is None or _GOES_ON.match(text, number.end()):
        return None
    before = text[max(0, number.start() - MAX_LEFT_SIDE) : number.start()]
    is_side = _EQUATION.search(before) and not _CHAIN.search(before)
    return None if is_side else number.group().strip()


def _in_sentence(sentence: str) -> str | None:
    """The answer in what follows "Answer:": all of it, a choice letter, what it begins with, or its last value."""
    sentence = _SENTENCE_END.split(sentence, maxsplit=1)[0].strip().strip("*_ ")
    if is_value(sentence):
        return sentence
    choice = _CHOICE.match(sentence)
    if choice is not None:
        return None if is_one_of_several(sentence, choice) else choice.group(1)
    first = _FORMULA.match(sentence) or _RUN.match(sentence)
    if first is not None and not _GOES_ON.match(sentence, first.end()):
        return _content(first)
    return _last_formula_or_number(sentence)


def is_one_of_several(text: str, letter: re.Match[str]) -> bool:
    """Whether the choice letter that `letter` found (its group 1) is named beside others: no choice is made."""
    return _FURTHER_CHOICE.match(text, letter.end(1)) is not None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _content(match: re.Match[str]) -> str:
    """The group that took part, or the whole match."""
    return next((group for group in match.groups() if group is not None), match.group())


def is_value(text: str) -> bool:
    """Whether the text as a whole says a number or a collection of numbers, and no more than that."""
    try:
        values.read(text)
    except ValueError:
        return False
    return not has_clauses(text)


def has_clauses(text: str) -> bool:
    """Whether its numbers are said one after the other: "since AB is 12, the area is 24" is no list, nor are paragraphs."""
    return bool(_CLAUSE.search(text) or _PARAGRAPH.search(text.strip()))
