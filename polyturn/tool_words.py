"""How Qwen's models were shown tools and their answers, for chat templates that have no words for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from polyturn.types import Json

# What is looked for in a rendering, to see whether the template has words of its own.
PROBE_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {"name": "tool_that_is_looked_for", "description": "", "parameters": {}},
}
ANSWER = "what the tool answered"
# Qwen's words around schemas and around what a tool answers: those of the templates of its text models and of Qwen3-VL.
_TOOLS_BEGIN = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_END = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_ANSWER_BEGIN = "<tool_response>\n"
_ANSWER_END = "\n</tool_response>"


def as_answer(message: Mapping[str, object]) -> Mapping[str, object]:
    """A tool's answer as a message of the user, which is how Qwen's models were shown them."""
    if message["role"] != "tool":
        return message
    said = message["content"]
    content = (
        f"{_ANSWER_BEGIN}{said}{_ANSWER_END}"
        if isinstance(said, str)
        else [
            {"type": "text", "text": _ANSWER_BEGIN},
            *cast("list[object]", said),
            {"type": "text", "text": _ANSWER_END},
        ]
    )
    return {"role": "user", "content": content}


def with_tools(
    chat: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, Json]], system: str
) -> Sequence[Mapping[str, object]]:
    """The conversation with the tools at the end of its system message; without one, of `system`."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = f"{_TOOLS_BEGIN}{schemas}{_TOOLS_END}"
    if not chat or chat[0]["role"] != "system":
        return [{"role": "system", "content": f"{system}\n\n{told}" if system else told}, *chat]
    said = chat[0]["content"]
    content = (
        f"{said}\n\n{told}"
        if isinstance(said, str)
        else [*cast("list[object]", said), {"type": "text", "text": f"\n\n{told}"}]
    )
    return [{"role": "system", "content": content}, *chat[1:]]
