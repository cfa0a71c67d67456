r"""Tool calls in a reply: Hermes/Qwen `<tool_call>{...}</tool_call>` as models really write it.

Also understood is the form of later Qwen models, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Rules, each pinned by a test:
- a call inside `<think>...</think>` is no call; a tag inside a JSON string is text;
- complete JSON counts although the closing tag is cut off; incomplete JSON is an error;
- a backslash that starts a LaTeX command, or no JSON escape, is kept as written (`\frac` stays `\frac`);
- raw newlines and tabs in strings, trailing commas, a code fence and text after the object are accepted;
- objects that follow each other between one pair of tags, also as a list, are a call each;
- `parameters` is taken for `arguments`, as Llama's models write it;
- a tag without a call behind it is an error, and hides no text unless it is closed;
- bare quotes inside a string are an error, never a guess; JSON without tags is no call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from polyturn.envs.lenient_json import MAX_CHARACTERS, MalformedJsonError, read_object
from polyturn.types import Json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<think>|</think>|<tool_call>")
_START = re.compile(r"\s*(?:```(?:json)?\s*)?(?:\[\s*(?=\{))?")
_NEXT = re.compile(r'[\s,]*(?=\{\s*"(?:name|function|type)")')
_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_PARAMETER_END = "</parameter>"
_FUNCTION_END = re.compile(r"\s*(?:</function>|(?=</tool_call>|<\||$))")
_EXAMPLE = '<tool_call>{"name": "NAME", "arguments": {"KEY": "VALUE"}}</tool_call>'


@dataclass(frozen=True)
class ToolCall:
    """One well-formed call; `arguments` is its JSON object."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True)
class ToolCallError:
    """A `<tool_call>` that is no call; `reason` says why in words for the model."""

    reason: str

    @property
    def message(self) -> str:
        """The observation that tells the model what to write."""
        return f"The tool call could not be read: {self.reason}. Write it like this: {_EXAMPLE}"


@dataclass(frozen=True)
class Reply:
    """A reply taken apart: its calls in order, and its text outside of calls and `<think>` blocks.

    `is_thinking` tells that a `<think>` block is still open at the end.
    """

    calls: tuple[ToolCall | ToolCallError, ...]
    text: str
    is_thinking: bool = False


def parse_tool_calls(text: str) -> list[ToolCall | ToolCallError]:
    """All calls of a reply, in order; an environment takes the last. Never raises."""
    return list(read_reply(text).calls)


def read_reply(text: str) -> Reply:
    """Take a reply apart; a `</think>` without a start (it stands in the prompt) ends a block from the start on."""
    calls: list[ToolCall | ToolCallError] = []
    kept: list[str] = []
    position = 0
    while tag := _TAG.search(text, position):
        kept.append(text[position : tag.start()])
        if tag.group() == _OPEN:
            found, position = _read_block(text, tag.end())
            calls += found
        elif tag.group() == "</think>":
            calls, kept, position = [], [], tag.end()
        else:
            close = text.find("</think>", tag.end())
            if close < 0:
                return Reply(tuple(calls), "".join(kept), is_thinking=True)
            position = close + len("</think>")
    kept.append(text[position:])
    return Reply(tuple(calls), "".join(kept))


def _read_block(text: str, start: int) -> tuple[list[ToolCall | ToolCallError], int]:
    """The calls whose payload starts at `start`, nearly always one, and the position after their block."""
    calls: list[ToolCall | ToolCallError] = []
    end = start
    while function := _FUNCTION.match(text, end):
        call, end = _read_function(text, function)
        calls.append(call)
    if calls:
        return calls, _end_of_block(text, end)
    begins = _START.match(text, start)
    while begins:
        try:
            value, end = read_object(text, begins.end())
        except MalformedJsonError as error:
            calls.append(ToolCallError(str(error)))
            is_prose = not calls[:-1] and not text.startswith(("{", "["), begins.end())
            return calls, _end_of_block(text, end, is_prose=is_prose)
        calls.append(_as_call(value))
        begins = _NEXT.match(text, end)
    return calls, _end_of_block(text, end)


def _read_function(text: str, function: re.Match[str]) -> tuple[ToolCall | ToolCallError, int]:
    """A call in tags of its own; a parameter is text, or the array or object that it spells."""
    arguments: dict[str, Json] = {}
    end = function.end()
    while found := _PARAMETER.match(text, end):
        close = text.find(_PARAMETER_END, found.end(), found.end() + MAX_CHARACTERS)
        if close < 0:
            break
        arguments[found[1].strip()] = _spelled(text[found.end() : close].strip())
        end = close + len(_PARAMETER_END)
    if not function[1].strip():
        return ToolCallError("<function=...> must name a function"), end
    closing = _FUNCTION_END.match(text, end)
    if closing is None:
        return ToolCallError("<parameter=...> and </parameter> must enclose each argument"), end
    return ToolCall(function[1].strip(), arguments), closing.end()


def _spelled(value: str) -> Json:
    if not value.startswith(("[", "{")):
        return value
    try:
        found, end = read_object(f'{{"value": {value}}}', 0)
    except MalformedJsonError:
        return value
    return found["value"] if end == len(value) + len('{"value": }') else value


def _end_of_block(text: str, position: int, *, is_prose: bool = False) -> int:
    """After the closing tag; where it is missing, the next opening tag or the end of the text, of prose its start."""
    again = text.find(_OPEN, position)
    limit = again if again >= 0 else len(text)
    close = text.find(_CLOSE, position, limit)
    if close >= 0:
        return close + len(_CLOSE)
    return position if is_prose else limit


def _as_call(value: Mapping[str, Json]) -> ToolCall | ToolCallError:
    if "function" in value:
        inner = value["function"]
        if not isinstance(inner, Mapping):
            return ToolCallError('"function" must be an object with "name" and "arguments"')
        value = inner
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name.strip():
        return ToolCallError('"name" must be the name of a function')
    if arguments is None or arguments == "":
        return ToolCall(name.strip(), {})  # a function that takes none
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if not isinstance(arguments, Mapping):
        return ToolCallError('"arguments" must be an object')
    return ToolCall(name.strip(), arguments)


def _decoded(arguments: str) -> Mapping[str, Json] | None:
    """Arguments that arrived as a JSON string; None where they hold no object."""
    stripped = arguments.strip()
    try:
        value, end = read_object(stripped, 0)
    except MalformedJsonError:
        return None
    return value if end == len(stripped) else None
