r"""A JSON object as language models write it: LaTeX backslashes, raw newlines and trailing commas are read."""

from __future__ import annotations

import json
import math
import re

from polyturn.types import Json

MAX_CHARACTERS = 20_000  # of one object; longer ones are refused
MAX_DEPTH = 64  # of nested objects and arrays

_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]+')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_UNICODE = re.compile(r"u([0-9a-fA-F]{4})(?:\\u([dD][c-fC-F][0-9a-fA-F]{2}))?")
_LETTERS = re.compile(r"[A-Za-z]+")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}
# LaTeX commands whose first letters look like the JSON escapes \b \f \n \r \t.
_LATEX_COMMANDS = """
    backepsilon backprime backsim backsimeq backslash bar barwedge bbox bcancel because begin begingroup beta beth between
    bf bfseries big bigcap bigcirc bigcup bigg biggl biggm biggr bigl bigm bigodot bigoplus bigotimes bigr bigskip bigsqcup
    bigstar bigtriangledown bigtriangleup biguplus bigvee bigwedge binom blacklozenge blacksquare blacktriangle
    blacktriangledown blacktriangleleft blacktriangleright bm bmatrix bmod bold boldsymbol bot bowtie boxdot boxed boxminus
    boxplus boxtimes bra brace brack braket breve buildrel bullet bumpeq
    fallingdotseq fbox fcolorbox fint flat footnote footnotesize forall frac frak framebox frown
    nLeftarrow nLeftrightarrow nRightarrow nVDash nVdash nabla natural ncong ne nearrow neg negmedspace negthickspace
    negthinspace neq newcommand newline nexists ngeq ngeqq ngeqslant ngtr ni nleftarrow nleftrightarrow nleq nleqq nleqslant
    nless nmid noalign nobreak nobreakspace noindent nolimits nonumber norm normalfont normalsize not notag notin notni
    nparallel nprec npreceq nrightarrow nshortmid nshortparallel nsim nsubset nsubseteq nsubseteqq nsucc nsucceq nsupset
    nsupseteq nsupseteqq ntriangleleft ntrianglelefteq ntriangleright ntrianglerighteq nu nvDash nvdash nwarrow
    rBrace rVert raisebox rang rangle rbag rbrace rbrack rceil real ref reflectbox relax renewcommand restriction
    rfloor rgroup rhd rho right rightarrow rightarrowtail rightharpoondown rightharpoonup rightleftarrows rightleftharpoons
    rightrightarrows rightsquigarrow rightthreetimes risingdotseq rlap rm rmoustache root rotatebox rtimes rule rvert
    tag tan tanh tau tbinom tcolorbox text textasciicircum textasciitilde textbackslash textbf textcirc textcolor textdegree
    textgreater textit textless textmd textminus textmu textnormal textpm textrm textsc textsf textsl textstyle textsubscript
    textsuperscript texttt textup tfrac therefore theta thetasym thickapprox thicksim thickspace thinspace tilde times tiny
    to top triangle triangledown triangleleft trianglelefteq triangleq triangleright trianglerighteq tt
    twoheadleftarrow twoheadrightarrow
"""
_LATEX = frozenset(_LATEX_COMMANDS.split())


class MalformedJsonError(ValueError):
    """No object can be read; the text says why, in words for a model."""


def read_object(text: str, start: int) -> tuple[dict[str, Json], int]:
    """Read the object that starts at `start`.

    Returns:
        The object, and the position after it.

    Raises:
        MalformedJsonError: there is no complete object, or it is too long or too deep.
    """
    reader = _Reader(text, start)
    if reader.peek() != "{":
        raise MalformedJsonError("a JSON object must follow the tag")
    value = reader.object(0)
    return value, start + reader.position


class _Reader:
    """A position in the text from `start` on, moved on by each read."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text[start : start + MAX_CHARACTERS]
        self._is_cut = len(text) > start + MAX_CHARACTERS
        self.position = 0

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        space = _SPACE.match(self._text, self.position)
        self.position = space.end() if space else self.position
        return self._text[self.position : self.position + 1]

    def _take(self, expected: str, what: str) -> None:
        seen = self.peek()
        if seen in ("", "<"):  # a tag
            raise self._ended()
        if seen != expected:
            raise MalformedJsonError(f"{what} expected, found {seen!r}")
        self.position += 1

    def _ended(self) -> MalformedJsonError:
        if self._is_cut:
            return MalformedJsonError(f"it is longer than {MAX_CHARACTERS} characters")
        return MalformedJsonError("the JSON object is not complete")

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise MalformedJsonError(f"it is nested deeper than {MAX_DEPTH}")
        first = self.peek()
        if first == "{":
            return self.object(depth)
        if first == "[":
            return self._array(depth)
        if first == '"':
            return self._string()
        return self._word()

    def object(self, depth: int) -> dict[str, Json]:
        """The object at the position."""
        self._take("{", "an object")
        found: dict[str, Json] = {}
        while self.peek() != "}":
            if self.peek() != '"':
                self._take('"', "a key in double quotes")
            key = self._string()
            self._take(":", f"a colon after {key[:40]!r}")
            found[key] = self._value(depth + 1)
            if self.peek() != "}":
                self._take(",", "a comma (are the quotes inside of strings escaped?)")
        self.position += 1
        return found

    def _array(self, depth: int) -> list[Json]:
        self._take("[", "an array")
        found: list[Json] = []
        while self.peek() != "]":
            found.append(self._value(depth + 1))
            if self.peek() != "]":
                self._take(",", "a comma (are the quotes inside of strings escaped?)")
        self.position += 1
        return found

    def _word(self) -> Json:
        letters = _LETTERS.match(self._text, self.position)
        if letters and letters.group() in _WORDS:
            self.position = letters.end()
            return _WORDS[letters.group()]
        number = _NUMBER.match(self._text, self.position)
        if number is None:
            seen = self._text[self.position : self.position + 20]
            raise MalformedJsonError(f"a value expected, found {seen!r}") if seen else self._ended()
        self.position = number.end()
        try:
            value: int | float = json.loads(number.group())
        except ValueError:  # Python refuses integers of more than 4,300 digits
            raise MalformedJsonError("a number is too long") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise MalformedJsonError(f"the number {number.group()[:40]} is too large")
        return value

    def _string(self) -> str:
        self.position += 1
        parts: list[str] = []
        while True:
            plain = _PLAIN.match(self._text, self.position)
            if plain:
                parts.append(plain.group())
                self.position = plain.end()
            if self.position >= len(self._text):
                raise self._ended()
            if self._text[self.position] == '"':
                self.position += 1
                return "".join(parts)
            parts.append(self._escape())

    def _escape(self) -> str:
        r"""The text that the backslash at the position stands for; `\` itself where it starts no JSON escape."""
        self.position += 1
        letter = self._text[self.position : self.position + 1]
        if letter == "u":
            return self._unicode()
        if letter not in _ESCAPES or letter == "":
            return "\\"
        command = _LETTERS.match(self._text, self.position)
        if command and command.group() in _LATEX:
            return "\\"
        self.position += 1
        return _ESCAPES[letter]

    def _unicode(self) -> str:
        match = _UNICODE.match(self._text, self.position)
        if match is None:
            return "\\"  # \underbrace
        high, low = int(match.group(1), 16), match.group(2)
        if 0xD800 <= high < 0xDC00 and low:
            self.position = match.end()
            return chr(0x10000 + ((high - 0xD800) << 10) + (int(low, 16) - 0xDC00))
        self.position += 5
        return (
            "\ufffd" if 0xD800 <= high < 0xE000 else chr(high)
        )  # a lone surrogate can be written to no file
