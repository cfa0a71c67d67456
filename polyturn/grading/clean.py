r"""Notation to plain form: LaTeX and Unicode spellings of one thing become one spelling."""

from __future__ import annotations

import re

MAX_OVER = 8  # fractions of plain TeX in one answer
MAX_CHARACTERS = 2_000  # of one answer; real ones have fewer than 300

_UNICODE = {
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    **dict.fromkeys("×·⋅∙✕•∗", "*"),
    **dict.fromkeys("÷∕⁄／", "/"),
    **dict.fromkeys("ºᵒ˚", "°"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2005\u2009\u200a\u202f\u3000\t\n\r", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **{full: chr(ord(full) - 0xFEE0) for full in "０１２３４５６７８９（），．＋＝％［］｛｝：；"},
    "。": ".",
    **dict.fromkeys("′’", "'"),
    "″": "''",
    **{script: f"^{digit}" for digit, script in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{script: f"_{digit}" for digit, script in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    "π": "\\pi ",
    "𝜋": "\\pi ",
    "∞": "\\infty ",
    "∅": "\\emptyset ",
    "√": "\\sqrt ",
    "∛": "\\sqrt[3]",
    "∠": "\\angle ",
    "△": "\\triangle ",
    "±": "\\pm ",
    "≈": "\\approx ",
    "≤": "\\leq ",
    "≥": "\\geq ",
    "≠": "\\neq ",
    "∪": "\\cup ",
    "∈": "\\in ",
    "½": "\\frac{1}{2}",
    "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "⅕": "\\frac{1}{5}",
    "⅙": "\\frac{1}{6}",
    "⅛": "\\frac{1}{8}",
}
_TRANSLATION = str.maketrans(_UNICODE)

_WRAPPERS = (
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|textup|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|mbox"
    r"|hbox|operatorname\*?|bm|boldsymbol)\s*"
)
_TEXT = re.compile(rf"{_WRAPPERS}\{{([^{{}}]*)\}}")
_WRAPPED_FORMULA = re.compile(rf"{_WRAPPERS}(?=\{{)")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?=[A-Za-z])", r"\\"),  # a doubled backslash before a command
        (r"\\!\s*", ""),
        (r"\{,\}", ","),
        (
            r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf|it)(?![A-Za-z])\.?",
            "",
        ),
        (r"(?<!\\)\\ |\\(?:[,;:>]|q?quad(?![A-Za-z])|hspace\{[^{}]*\})|(?<!\\)~", " "),
        (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"\\surd(?![A-Za-z])", r"\\sqrt "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\s*\\colon(?![A-Za-z])\s*|(?<=[\d}])\s+to\s+(?=[\d\\])|\s:\s", ":"),
        (
            r"(?:[,;]?\s*\b(?:or|which is))?\s*(?<!\\)\b(?:approximately|approx\.?|roughly|about)\s+(?=[-\d\\.])",
            r"\\approx ",
        ),
        (r"(?<=\d)\s*(?:\\[lc]?dots(?![A-Za-z])|…)\s*$", ""),  # 0.333\ldots as 0.333...
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(?:[()\[\]]|\$)|[$€£]", " "),
        (r"\\?%", " "),
        (r"(?<![A-Za-z])(?:percent|pct)\b", " "),
        (r"\{\s*\}", ""),
        (
            r"\^\s*(?:\{\s*(?:\\circ|°|\\degree|o)\s*\}|\\circ(?![A-Za-z])|°|\\degree(?![A-Za-z])|o(?![A-Za-z]))",
            "°",
        ),
        (r"\\(?:text)?degrees?(?![A-Za-z])|(?<![A-Za-z])deg(?:ree)?s?\.?(?![A-Za-z])", "°"),
        (r"\\(?:lt|gt)(?![A-Za-z])", ""),
        (r"\s+", " "),
    )
)
# What stands between the equations of `a = 3 \\ b = 4`: a new line, a wide space or a column.
_NEXT_EQUATION = re.compile(
    r"(?<=[\d})])\s*(?:\n|\\q?quad(?![A-Za-z])|\\\\(?:\[[^\[\]]*\])?|&)\s*"
    r"(?=(?:m?\s*\\angle\s*)?[A-Za-z]{1,3}(?:_\{?\w+\}?)?\s*=)"
)
_ROUND_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_EDGES = " .,;:*_`\"'。，；："

_UNIT_WORDS = (
    "units?|cent[ei]met(?:er|re)s?|millimet(?:er|re)s?|kilomet(?:er|re)s?|met(?:er|re)s?|inch(?:es)?|foot|feet|"
    "yards?|miles?|mph|kph|cm|mm|km|dm|ft|yds?|mi|in|m|radians?|rads?|hours?|hrs?|minutes?|mins?|seconds?|secs?|"
    "days?|dollars?|cents?|euros?|yuan|kg|grams?|lbs?|pounds?|lit(?:er|re)s?|ml"
)
_UNIT = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?(?:{_UNIT_WORDS})\.?(?:\s*(?:\^\s*(?:\{{\s*[23]\s*\}}|[23])|[23]))?"
_PER = rf"(?:{_UNIT}|s|h)"
_TRAILING_UNIT = re.compile(
    rf"(?<=[\d\s°}})\]i])\s*(?:{_UNIT}(?:\s*(?:/|per)\s*{_PER})?|\{{\s*{_UNIT}\s*\}}"
    rf"|\\frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_PER}\s*\}})\s*$"
)
FUNCTIONS = r"(?:pi|sqrt|sin|cos|tan|sec|csc|cot|log|ln|exp|and|or|not|to|than|nor)"
_TRAILING_WORDS = re.compile(rf"(?<=[\d}})°])(?:\s+(?!{FUNCTIONS}\b)[A-Za-z]{{2,}})+$")
# What is said about a value behind it: (approximately), (\approx 37.7), (cubic cm).
_REMARK = re.compile(
    rf"(?:(?<=[\d}})°])|(?<=\\pi))\s*\((?:\\approx[^()]*|°|not\b[^()]*|(?!{FUNCTIONS})[a-z]{{3,}}[^()]*|{_UNIT})\)\s*$"
)
# 30°15'20''
_SEXAGESIMAL = re.compile(
    r"(\d+)\s*°\s*([0-5]?\d(?:\.\d+)?)\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)(?![A-Za-z'])"
    r"(?:\s*([0-5]?\d(?:\.\d+)?)\s*(?:''|\"|\^\s*\{?\s*\\prime\s*\\prime\s*\}?))?"
)
_OVER = re.compile(r"\\over(?![A-Za-z])\s*")
_BARE_FRACTION = re.compile(r"\\[dtc]?frac\s+([A-Za-z\d])\s*([A-Za-z\d])(?![A-Za-z\d])")
_LEADING_WORDS = re.compile(
    rf"^(?:(?!{FUNCTIONS}\b|[a-z]*frac\b)[A-Za-z]{{2,}}[\s:]+)+(?=[-\d\\(.])"
)
_CHOICE = re.compile(r"^(?:\([A-H]\)[.:]?|[A-H][.:)])\s+(?=[-\d\\(.])")
_EQUALS = re.compile(r"(?<![<>!:])=+|\\(?:equiv|in)(?![A-Za-z])")
_APPROX = re.compile(r"\\(?:approx|simeq|doteq|sim)(?![A-Za-z])")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])(?![ei](?![A-Za-z]))[A-Za-z]")
# No product (2x), sum, power, root or absolute value of a variable: such an equation says another number than its right side.
_LEFT_SIDE = re.compile(
    r"^(?!\s*(?:\d+\s*[A-Za-z\\]|-))(?!.*(?:\\sqrt|\|\s*[a-z]\s*\||-\s*(?:\d|[A-Za-z](?![A-Za-z]))))[^+*<>^/]*$"
)
_BRACKETED = re.compile(r"\([^()]*\)")
# Between answers of their own; not the comma of 1,250.
_SEPARATOR = re.compile(r",(?!\d{3}(?!\d))|;|\\\\|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")


class TooLongError(ValueError):
    """An answer has more characters than are read."""


def plain(text: str) -> str:
    """The text with one spelling per thing; percent signs and currency signs are dropped.

    Raises:
        TooLongError: it is longer than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLongError(
            f"an answer of {len(text)} characters is not read (limit {MAX_CHARACTERS})"
        )
    shown = _NEXT_EQUATION.sub("; ", text).translate(_TRANSLATION)
    while (replaced := _TEXT.sub(r" \1 ", shown)) != shown:
        shown = replaced
    shown = _over_to_frac(_WRAPPED_FORMULA.sub("", shown))
    for pattern, replacement in _RULES:
        shown = pattern.sub(replacement, shown)
    shown = _SEXAGESIMAL.sub(_degrees, shown)
    return trim(_REMARK.sub("", trim(shown)))


def for_sympy(text: str) -> str:
    """LaTeX that math-verify reads right: formula marks around it, no Unicode, no round brackets after a root."""
    shown = _over_to_frac(_ROUND_ROOT.sub(r"\\sqrt{\1}", text.translate(_TRANSLATION)))
    shown = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", shown)
    return shown if re.search(r"\$|\\\(|\\\[", shown) else f"${shown}$"


def _degrees(match: re.Match[str]) -> str:
    degrees, minutes, seconds = match.groups(default="0")
    return f"({degrees}+{minutes}/60+{seconds}/3600)°"


def _over_to_frac(text: str) -> str:
    r"""`{a \over b}` and `x = a \over b` as fractions."""
    for _ in range(MAX_OVER):
        if (found := _OVER.search(text)) is None:
            break
        start, end, depth = found.start(), found.end(), 0
        while start > 0 and not (depth == 0 and text[start - 1] in "{=,$"):
            start -= 1
            depth += (text[start] == "}") - (text[start] == "{")
        depth = 0
        while end < len(text) and not (depth == 0 and text[end] in "}=,$"):
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        top, bottom = text[start : found.start()], text[found.end() : end]
        text = f"{text[:start]}\\frac{{{top.strip()}}}{{{bottom.strip()}}}{text[end:]}"
    return text


def trim(text: str) -> str:
    r"""Without white space, punctuation, Markdown marks and stray backslashes at the edges; `.5` keeps its point."""
    shown = text.strip(_EDGES.replace(".", "")).rstrip(_EDGES + "\\")
    return shown.lstrip(" ")


def right_side(text: str) -> str:
    r"""What `x = 5`, `5 = x`, `m\angle A = 30` and `x = 3\sqrt{2} \approx 4.24` say that the value is; no equation is solved.

    Of a chain that begins with a name, `A = \pi r^2 = 25\pi`, it is the end. `x = 3, y = 4` says two and stays as it is.
    """
    exact, *rounded = _APPROX.split(text)
    if rounded and not _EQUALS.search(exact):
        value = without_leading_words(exact.strip())
        return value if value and not _VARIABLE.search(value) else rounded[0].strip()
    *left, right = _EQUALS.split(exact)
    if any(_SEPARATOR.search(_BRACKETED.sub("", side)) for side in left):
        return text
    if len(left) == 1 and is_name(right) and left[0].strip() and not _VARIABLE.search(left[0]):
        return left[0].strip()
    if left and all(_LEFT_SIDE.match(side) or not _VARIABLE.search(side) for side in left):
        return right.strip()
    if len(left) > 1 and is_name(left[0]) and not _VARIABLE.search(right):
        return right.strip()
    return text


def is_name(side: str) -> bool:
    """Whether a side of an equation is what has the value: a variable, a segment, an angle."""
    return bool(_VARIABLE.search(side) and _LEFT_SIDE.match(side))


def without_units(text: str) -> str:
    """The text without a unit and words around the value: `12 cm`, `12 apples`, `about 5`, `(C) 5`."""
    shown = _CHOICE.sub("", text)
    for _ in range(3):
        shorter = trim(_TRAILING_UNIT.sub("", shown))
        if shorter == shown or not shorter:
            break
        shown = shorter
    shown = _TRAILING_WORDS.sub("", shown)
    return without_leading_words(shown)


def without_leading_words(text: str) -> str:
    """The text from its first number or formula on, where only words stand before it."""
    return _LEADING_WORDS.sub("", text)
