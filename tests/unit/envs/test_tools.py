"""parse_tool_calls: reported cases, texts of other projects' tests, any JSON, any mutation."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.envs.tools import ToolCall, ToolCallError, parse_tool_calls, read_reply
from polyturn.reward import answers_match
from polyturn.types import Json

SHARED = Path(__file__).resolve().parents[3].parent / "shared"


def wrap(payload: str) -> str:
    return f"<tool_call>\n{payload}\n</tool_call>"


def answer_call(raw: str) -> str:
    """A call whose answer is written exactly as `raw` between the quotes."""
    return wrap('{"name": "calc_score", "arguments": {"answer": "' + raw + '"}}')


def only_call(text: str) -> ToolCall:
    (call,) = parse_tool_calls(text)
    assert isinstance(call, ToolCall), call
    return call


def only_error(text: str) -> str:
    (call,) = parse_tool_calls(text)
    assert isinstance(call, ToolCallError), call
    assert "<tool_call>" in call.message, "the model is told what to write"
    return call.reason


def test_a_closing_tag_inside_a_string_is_text() -> None:  # TOOL-01
    text = '<tool_call>{"name":"calc_score","arguments":{"answer":"12 </tool_call> 3"}}</tool_call> and so on'
    assert only_call(text).arguments == {"answer": "12 </tool_call> 3"}
    assert read_reply(text).text == " and so on"


def test_nested_objects_with_line_breaks_between_braces() -> None:  # TOOL-02
    text = wrap(
        '{"name": "f", "arguments": {"answer": "\\\\frac{1}{2}", "meta": {"k": {"z": 1 }\n }\n\n}\n }'
    )
    assert only_call(text).arguments == {"answer": "\\frac{1}{2}", "meta": {"k": {"z": 1}}}


def test_raw_newlines_and_tabs_in_strings_are_kept() -> None:  # TOOL-04 (i)
    assert only_call(answer_call("a\nb\tc")).arguments == {"answer": "a\nb\tc"}


def test_bare_quotes_in_a_string_are_an_error_and_no_guess() -> None:  # TOOL-04 (ii)
    assert "quotes" in only_error(answer_call('say "5"'))


@pytest.mark.parametrize("ending", ["", "</tool_ca", "\n", "<|im_end|>"])
def test_complete_json_counts_without_its_closing_tag(ending: str) -> None:  # TOOL-05
    text = 'I check. <tool_call>{"name":"calc_score","arguments":{"answer":"7"}}' + ending
    assert only_call(text) == ToolCall("calc_score", {"answer": "7"})


def test_incomplete_json_is_an_error() -> None:
    assert "not complete" in only_error('<tool_call>{"name":"calc_score","arguments":{"answer":"7')


def test_arguments_may_be_a_json_string() -> None:  # TOOL-08
    text = wrap('{"name": "calc_score", "arguments": "{\\"answer\\": \\"30\\"}"}')
    assert only_call(text).arguments == {"answer": "30"}
    latex = wrap('{"name": "calc_score", "arguments": "{\\"answer\\": \\"\\\\\\\\frac{1}{2}\\"}"}')
    assert only_call(latex).arguments == {"answer": "\\frac{1}{2}"}


def test_calls_inside_think_are_no_calls() -> None:  # TOOL-10
    real = '<tool_call>{"name": "calc_score", "arguments": {"answer": "6"}}</tool_call>'
    prose = "I could send <tool_call>{name: calc_score, answer: 1}</tool_call> ..."
    assert only_call(f"<think>{prose}</think>{real}").arguments == {"answer": "6"}
    assert only_call(f"{prose}</think>{real}").arguments == {"answer": "6"}, (
        "the opening tag stands in the prompt"
    )
    assert parse_tool_calls(f"<think>{real}") == []
    assert read_reply(f"<think>{real}").is_thinking


def test_a_think_tag_inside_a_string_is_text() -> None:
    text = answer_call("</think><think>") + answer_call("5")
    assert [
        call.arguments["answer"] for call in parse_tool_calls(text) if isinstance(call, ToolCall)
    ] == [
        "</think><think>",
        "5",
    ]


@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```"])
def test_json_without_tags_is_no_call(fence: str) -> None:  # TOOL-12
    payload = '{"name":"calc_score","arguments":{"answer":"8"}}'
    assert parse_tool_calls(fence.replace("{}", payload)) == []
    assert only_call(wrap(fence.replace("{}", payload))).arguments == {"answer": "8"}


@pytest.mark.parametrize(
    ("raw", "reference"), [("\\sqrt{3}", "\\sqrt{3}"), ("30^\\circ", "30"), ("6\\pi", "6\\pi")]
)
def test_single_backslashes_stay_and_grade_right(raw: str, reference: str) -> None:  # TOOL-15
    answer = only_call(answer_call(raw)).arguments["answer"]
    assert answer == raw
    assert answers_match(str(answer), reference)


@pytest.mark.parametrize(
    "raw",
    [
        "\\frac{1}{2}",
        "\\text{cm}",
        "\\nabla",
        "\\beta",
        "\\underbrace",
        "\\right)",
        "\\theta",
        "\\boldsymbol{5}",
        "\\textsuperscript{2}",
        "\\blacksquare",
        "5 \\tag{1}",
        "\\rightleftharpoons",
        "\\fcolorbox",
        "\\newline",
        "\\bigtriangleup",
        "\\trianglerighteq",
        "\\norm{v}",
        "30\\textdegree",
        "\\uparrow",
        "\\bmatrix",
    ],
)
def test_latex_that_looks_like_a_json_escape_is_not_corrupted(raw: str) -> None:  # TOOL-16
    answer = only_call(answer_call(raw)).arguments["answer"]
    assert answer == raw
    assert only_call(answer_call(raw.replace("\\", "\\\\"))).arguments["answer"] == raw, (
        "escaped it reads the same"
    )


def test_a_fraction_with_a_single_backslash_is_a_half() -> None:  # TOOL-16
    assert answers_match(str(only_call(answer_call("\\frac{1}{2}")).arguments["answer"]), "0.5")


def test_several_calls_are_all_returned_in_order() -> None:  # TOOL-17
    text = f"First {answer_call('3')} then {answer_call('5')} done."
    calls = parse_tool_calls(text)
    assert [call.arguments for call in calls if isinstance(call, ToolCall)] == [
        {"answer": "3"},
        {"answer": "5"},
    ]
    assert read_reply(text).text == "First  then  done."


@pytest.mark.parametrize("between", ["", "\n", ",\n", "  \n\n"])
def test_objects_after_each_other_in_one_block_are_a_call_each(between: str) -> None:  # TOOL-17
    """NousResearch/hermes-agent#6841: all but the first were dropped without a word."""
    one, two = '{"name": "a", "arguments": {}}', '{"name": "b", "arguments": {"x": 1}}'
    reply = read_reply(f"Both: {wrap(one + between + two)} done")
    assert reply.calls == (ToolCall("a", {}), ToolCall("b", {"x": 1}))
    assert reply.text == "Both:  done"
    first, second = parse_tool_calls(wrap(one + between + two[:-3]))
    assert first == ToolCall("a", {})
    assert isinstance(second, ToolCallError)
    assert only_call(wrap(one + between + "{so far}")) == ToolCall("a", {})


@pytest.mark.parametrize("payload", ["[{}]", "[\n  {}\n]", "```json\n[{}]\n```"])
def test_a_list_of_objects_is_a_call_each(payload: str) -> None:
    one, two = '{"name": "a", "arguments": {}}', '{"name": "b", "parameters": {"x": 1}}'
    reply = read_reply(f"Both: {wrap(payload.replace('{}', f'{one}, {two}'))} done")
    assert reply.calls == (ToolCall("a", {}), ToolCall("b", {"x": 1}))
    assert reply.text == "Both:  done"


def test_parameters_are_arguments() -> None:
    """SGLang's detectors read both: Llama's models write `parameters`, and so do others now and then."""
    call = '{"name": "f", "parameters": {"answer": "5"}}'
    assert only_call(wrap(call)) == ToolCall("f", {"answer": "5"})
    both = '{"name": "f", "parameters": {"answer": "4"}, "arguments": {"answer": "5"}}'
    assert only_call(wrap(both)) == ToolCall("f", {"answer": "5"})


@pytest.mark.parametrize(
    "payload",
    [
        "<function=calc_score><parameter=answer>{}</parameter></function>",
        "\n<function=calc_score>\n<parameter=answer>\n{}\n</parameter>\n</function>\n",
        "\n<function=calc_score>\n<parameter=answer>\n{}\n</parameter>\n",
    ],
)
@pytest.mark.parametrize("answer", ["5", "\\frac{1}{2}", "3√2\nor so", "{1, 2}", '"5"', "x < 3"])
def test_a_call_in_tags_of_its_own_is_read(payload: str, answer: str) -> None:
    """panbanda/higgs#177, QwenLM/Qwen3.8#125: the form of Qwen3.5 and Qwen3-Coder was dropped."""
    text = f"I check. <tool_call>{payload.replace('{}', answer)}</tool_call> So"
    assert read_reply(text).calls == (ToolCall("calc_score", {"answer": answer}),)
    assert read_reply(text).text == "I check.  So"


@pytest.mark.parametrize("between", ["", "\n", " \n\n"])
def test_calls_in_tags_after_each_other_in_one_block_are_a_call_each(between: str) -> None:
    one, two = "<function=a></function>", "<function=b>\n<parameter=x>1</parameter>\n</function>"
    reply = read_reply(f"Both: {wrap(one + between + two)} done")
    assert reply.calls == (ToolCall("a", {}), ToolCall("b", {"x": "1"}))
    assert reply.text == "Both:  done"
    first, second = parse_tool_calls(wrap(one + between + "<function=b>x</function>"))
    assert first == ToolCall("a", {})
    assert isinstance(second, ToolCallError)


def test_lists_and_objects_in_a_call_in_tags_are_values() -> None:
    """waybarrios/vllm-mlx#63: what is no JSON stays text, and nothing is guessed."""
    text = wrap(
        "<function=zoom>\n<parameter=bbox_2d>\n[1, 2, 3, 4]\n</parameter>\n"
        "<parameter=style>{'theme': 'dark'}</parameter>\n<parameter=more>{\"a\": [true]}</parameter>\n</function>"
    )
    expected: dict[str, Json] = {
        "bbox_2d": [1, 2, 3, 4],
        "style": "{'theme': 'dark'}",
        "more": {"a": [True]},
    }
    assert only_call(text) == ToolCall("zoom", expected)
    assert only_call(wrap("<function=look></function>")) == ToolCall("look", {})


@pytest.mark.parametrize(
    "payload",
    [
        "<function=>x</function>",
        "<function=f><parameter=a>5</function>",
        "<function=f>5</function>",
    ],
)
def test_a_broken_call_in_tags_is_an_error(payload: str) -> None:
    assert only_error(wrap(payload))


def test_a_tag_that_is_only_mentioned_hides_no_answer() -> None:
    """gty111/gLLM#285: everything after a mentioned tag was discarded."""
    text = "I need no `<tool_call>` here: \\boxed{5}"
    assert only_error(text)
    assert read_reply(text).text == "I need no `` here: \\boxed{5}"
    assert answers_match(text, "5")
    call = answer_call("6")
    first, second = parse_tool_calls(f"No <tool_call> yet. Now: {call}")
    assert isinstance(first, ToolCallError)
    assert second == ToolCall("calc_score", {"answer": "6"})
    cut = '<tool_call>{"name": "calc_score", "arguments": {"answer": "\\boxed{5}'
    assert not answers_match(cut, "5"), "a call that is cut short is no text"


@pytest.mark.parametrize("end", ["</tool_call>", "<|im_end|>", ""])
def test_a_missing_brace_is_told_as_such(end: str) -> None:
    """vllm-project/vllm#22885, defeat-beta/defeatbeta-api#72."""
    for call in (
        '{"name": "f", "arguments": {"answer": "5"}',
        '{"name": "f", "arguments": {"x": 5',
    ):
        assert "not complete" in only_error(f"<tool_call>\n{call}\n{end}")


def test_a_call_after_an_unclosed_one_is_found() -> None:
    calls = parse_tool_calls(
        '<tool_call>{"name": oops <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    assert isinstance(calls[0], ToolCallError)
    assert calls[1:] == [ToolCall("f", {})]


@pytest.mark.parametrize(
    "payload",
    [
        '{"name":"calc_score","arguments":["5"]}',
        '{"function":null}',
        '{"function":"calc_score"}',
        '{"name":5,"arguments":{}}',
        '{"name":"","arguments":{}}',
        '{"name":"f","arguments":"5"}',
        '{"name":"f","arguments":"{} {}"}',
        '["f"]',
        "f(5)",
        "",
        "null",
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": ' + '{"a":' * 100 + "1" + "}" * 101,
        '{"name": "f", "arguments": {"x": "' + "y" * 30_000 + '"}}',
        "{'name': 'f', 'arguments': {}}",
    ],
)
def test_every_wrong_shape_is_an_error_in_words(payload: str) -> None:  # TOOL-19
    assert only_error(wrap(payload))


def test_a_number_stays_a_number() -> None:  # TOOL-19
    assert only_call(wrap('{"name":"calc_score","arguments":{"answer":5}}')).arguments == {
        "answer": 5
    }


@pytest.mark.parametrize(
    "rest", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}']
)
def test_a_call_of_a_function_without_arguments(rest: str) -> None:
    """slime reads `call.get("arguments") or {}`; whoever needs an argument says which one is missing."""
    assert only_call(wrap(f'{{"name": "f"{rest}}}')) == ToolCall("f", {})


def test_the_openai_shape_with_function_is_read() -> None:
    text = wrap('{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}')
    assert only_call(text) == ToolCall("f", {"x": 1})


def test_trailing_commas_and_text_are_accepted() -> None:
    assert only_call(
        wrap('{"name": "f", "arguments": {"x": [1, 2,], "y": 3,},} I hope')
    ).arguments == {"x": [1, 2], "y": 3}


def test_unicode_is_kept_and_lone_surrogates_are_replaced() -> None:
    assert only_call(answer_call("上海 60° \\u00e9 \\ud83d\\ude00")).arguments == {
        "answer": "上海 60° é 😀"
    }
    assert only_call(answer_call("\\ud83d x")).arguments == {"answer": "\ufffd x"}


def _as_written(name: str | None, payload: str) -> ToolCall | None:
    """The call of a payload in JSON (then `name` is its name) or in tags; None where it is none."""
    if name is not None:
        return ToolCall(name, json.loads(payload)["arguments"])
    function = re.match(r"<function=(\w+)>", payload)
    parameters = re.findall(r"<parameter=(\w+)>(.*?)</parameter>", payload)
    return ToolCall(function[1], dict(parameters)) if function else None


def test_all_texts_of_other_projects_are_read_as_they_parse_them() -> None:
    path = SHARED / "data/tool_call_texts.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        found = parse_tool_calls(row["text"])
        visible = row["text"].split("</think>")[-1]
        expected = [
            call
            for name, payload in zip(row["names"], row["payloads"], strict=True)
            if payload in visible and (call := _as_written(name, payload)) is not None
        ]
        assert [call for call in found if isinstance(call, ToolCall)] == expected, row["text"]
        assert len(found) == visible.count("<tool_call>"), (
            "what is no call is an error, not nothing"
        )


CONTROLS = "\b\f\n\r\t"  # written as an escape with a letter, which may begin a LaTeX command
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=CONTROLS), max_size=30)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(
    arguments=st.dictionaries(texts, json_values, max_size=5),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
@settings(deadline=None)
def test_any_arguments_come_back_as_they_were(
    arguments: dict[str, Json], ascii_only: bool, indent: int | None
) -> None:
    payload = json.dumps(
        {"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent
    )
    assert only_call(f"text {wrap(payload)} text").arguments == arguments


@given(
    arguments=st.dictionaries(
        st.text("abc", max_size=3), st.text('ab \n\t\r\f\b\\"', max_size=12), max_size=4
    )
)
@settings(deadline=None)
def test_control_characters_come_back_where_no_latex_command_follows(
    arguments: dict[str, str],
) -> None:
    payload = json.dumps({"name": "f", "arguments": arguments})
    assert only_call(wrap(payload)).arguments == arguments


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '"',
    "\\",
    "{",
    "}",
    "[",
    ",",
    ":",
    "\\u12",
    "null",
    "1e",
    "\ud800",
    "\n",
]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_mutation_raises(data: st.DataObject) -> None:
    text = (
        answer_call("\\\\frac{1}{2}")
        + " and "
        + wrap('{"name": "f", "arguments": "{\\"a\\": [1, {}]}"}')
    )
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 9)))
        text = text[:start] + data.draw(st.sampled_from(PIECES) | texts) + text[end:]
    for call in parse_tool_calls(text):
        assert isinstance(call, ToolCall | ToolCallError)


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        '<tool_call>{"a":"',
        '<tool_call>{"a":{"b":[',
        "<tool_call><function=a><parameter=b>",
        "<function=a>",
        "<function=a><parameter=b>c</parameter>",
        "<think>",
        "</think>",
        "{",
        "\\",
        " ",
    ],
)
def test_a_megabyte_of_anything_is_read_in_seconds(piece: str) -> None:
    start = time.process_time()
    parse_tool_calls("<tool_call>" + piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 5
