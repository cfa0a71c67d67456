"""The Geometry3K env: feedback per turn, last-chance wording, no leak without the oracle, no turn limit of its own."""

from __future__ import annotations

import json
import random

import pytest

from polyturn.corpus import corpus
from polyturn.envs.base import EnvContext, build, load_object
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.geo3k import (
    LAST_CHANCE,
    TOOL_NAMES,
    Geo3kEnv,
    build_env,
    demonstrations,
    texts,
    tool_call,
)
from polyturn.policy.small_model import train_tokenizer
from polyturn.types import Json, Message, Problem
from tests.unit import tiny

PROBLEM = Problem("g1", "train", (Message("user", ("Find x.",)),), "3 \\sqrt { 2 }")


def make(*, max_turns: int = 5, **params: object) -> Geo3kEnv:
    env = build(
        load_object("polyturn.envs.geo3k:build_env", "env.build"),
        EnvContext(PROBLEM, params, max_turns),
    )
    assert isinstance(env, Geo3kEnv)
    return env


def call(answer: Json, name: str = "calc_score") -> str:
    return f"Let me check.\n<tool_call>\n{json.dumps({'name': name, 'arguments': {'answer': answer}})}\n</tool_call>"


@pytest.mark.parametrize("name", ["calc_score", "calc_geo3k_reward"])
def test_both_tool_names_give_the_same_feedback(name: str) -> None:
    observation, done, info = make().step(call("\\sqrt{18}", name))
    assert "correct (score 1)" in observation.text
    assert (done, info["score"], observation.role) == (False, 1.0, "tool")
    assert name in TOOL_NAMES


def test_feedback_comes_each_turn_and_the_last_call_counts() -> None:
    env = make()
    assert "wrong (score 0)" in env.step(call("5"))[0].text
    observation, _, info = env.step(call("5") + call("4.242640687119285"))
    assert "correct" in observation.text
    assert (info["num_tool_calls"], info["score"]) == (2, 1.0)


def test_single_backslashes_grade_like_escaped_ones() -> None:
    text = '<tool_call>{"name": "calc_score", "arguments": {"answer": "\\frac{6}{\\sqrt{2}}"}}</tool_call>'
    assert make().step(text)[2]["score"] == 1.0


def test_a_number_as_answer_is_graded_and_other_shapes_are_explained() -> None:
    env = Geo3kEnv("5", oracle=True, max_turns=9)
    assert env.step(call(5))[2]["score"] == 1.0
    for bad in ({"v": 5}, ["5"], None, True, "  "):
        observation, done, info = env.step(call(bad))
        assert info == {"num_tool_calls": 1, "tool_error": True}
        assert not done
        assert '"answer" as a string' in observation.text
        assert "<tool_call>" in observation.text, "the model is told what to write"


def test_an_unknown_tool_and_broken_json_are_explained_and_the_episode_goes_on() -> None:
    env = make()
    observation, done, info = env.step(call("5", "calculator"))
    assert "no function 'calculator'" in observation.text
    assert (done, info["tool_error"]) == (False, True)
    observation, done, info = env.step(
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "5"'
    )
    assert "not complete" in observation.text
    assert (done, info["tool_error"]) == (False, True)


def test_a_reply_without_a_call_ends_the_episode() -> None:
    observation, done, info = make().step("Answer: \\boxed{5}")
    assert (observation.text, done, info["num_tool_calls"]) == ("", True, 0)


@pytest.mark.parametrize("max_turns", [1, 2, 3, 4])
def test_the_last_chance_is_said_exactly_when_one_reply_is_left(max_turns: int) -> None:
    env = make(max_turns=max_turns)
    said = [turn for turn in range(1, 7) if LAST_CHANCE in env.step(call("5"))[0].text]
    assert said == [max_turns - 1] * (max_turns > 1)


def test_the_env_has_no_turn_limit_of_its_own() -> None:
    env = make(max_turns=2)
    assert [env.step(call("5"))[1] for _ in range(6)] == [False] * 6


def test_without_the_oracle_right_and_wrong_look_the_same() -> None:
    right, wrong = (
        make(oracle=False).step(call(answer)) for answer in ("3\\sqrt{2}", "4\\sqrt{2}")
    )
    assert right[0].text.replace("3\\sqrt", "4\\sqrt") == wrong[0].text
    assert right[2] == wrong[2] == {"num_tool_calls": 1, "tool_error": False}
    assert "no value" in make(oracle=False).step(call("see figure"))[0].text


def test_rounding_and_tolerance_grade_as_in_the_reward() -> None:
    decimal = Problem("g2", "train", (), "4.24")
    for params, score in (
        ({}, 1.0),
        ({"rounding": "strict"}, 0.0),
        ({"rounding": "strict", "tolerance": 0.01}, 1.0),
    ):
        assert build_env(decimal, params, 3).step(call("3\\sqrt{2}"))[2]["score"] == score


def test_feedback_never_shows_the_reference() -> None:
    for oracle in (True, False):
        text = make(oracle=oracle).step(call("5"))[0].text
        assert "\\sqrt { 2 }" not in text


@pytest.mark.parametrize(
    "params",
    [
        {"oracle": "no"},
        {"orcale": False},
        {"rounding": "up"},
        {"tolerance": -1},
        {"tolerance": True},
    ],
)
def test_wrong_params_name_the_key(params: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"env\.params"):
        build_env(PROBLEM, params, 3)


def test_the_schema_describes_the_tool() -> None:
    (schema,) = make().tools
    assert json.loads(json.dumps(schema))["function"]["name"] == "calc_score"


def test_the_demonstration_answers_in_a_box() -> None:
    shown = demonstrations("answer", PROBLEM, random.Random(0), {})
    assert shown.prompt == PROBLEM.messages
    assert shown.turns == (Say("Answer: \\boxed{3 \\sqrt { 2 }}"),)
    with pytest.raises(
        ValueError, match=r"knows the kinds .*'answer', 'confirm', 'read', 'retry'.*got 'search'"
    ):
        demonstrations("search", PROBLEM, random.Random(0), {})
    with pytest.raises(
        ValueError,
        match=r"needs data.source: synthetic, but problem g1 has no label.*kind 'answer' takes other",
    ):
        demonstrations("retry", PROBLEM, random.Random(0), RETRY)


RETRY = {
    "skill": 1.0,
    "check": 1.0,
    "persist": 1.0,
    "oracle": 1.0,
    "guess_min": 2,
    "guess_max": 6,
    "max_turns": 3,
}


def retry_turns(seed: int = 0, **changed: float) -> tuple[str, ...]:
    """What is said in a `retry` example of a problem with answer "16" (a square of side 4), in order."""
    problem = tiny_problem(shape="square", quantity="area", label=4)
    shown = demonstrations("retry", problem, random.Random(seed), {**RETRY, **changed})
    return tuple(turn.text for turn in shown.turns)


def tiny_problem(**metadata: Json) -> Problem:
    return Problem("s1", "train", (Message("user", ("Find the area.",)),), "16", metadata)


def test_a_skilled_demonstrator_checks_the_right_answer_and_gives_it() -> None:
    call, feedback, last = retry_turns()
    assert (call, last) == (tool_call("16"), "Answer: \\boxed{16}")
    assert "The answer 16 is correct (score 1)" in feedback


def test_an_unskilled_one_tries_other_answers_until_one_reply_is_left() -> None:
    seen = [retry_turns(seed, skill=0.0) for seed in range(60)]
    wrong_twice = [turns for turns in seen if len(turns) == 5 and "wrong" in turns[3]]
    assert wrong_twice, "some miss twice"
    for first, _, second, feedback, last in wrong_twice:
        guesses = {first.split('"')[-2], second.split('"')[-2], last[len("Answer: \\boxed{") : -1]}
        assert len(guesses) == 3, "no guess is repeated"
        assert guesses <= {"4", "9", "16", "25", "36"}, "answers that labels 2 to 6 give"
        assert LAST_CHANCE in feedback, "as the environment would say it"
    assert all(turns[-1] == "Answer: \\boxed{16}" for turns in seen if "correct" in turns[-2])


def test_without_check_persistence_or_feedback_the_demonstrator_stops_earlier() -> None:
    assert {len(retry_turns(seed, check=0.0)) for seed in range(20)} == {1}
    assert {len(retry_turns(seed, skill=0.0, persist=0.0)) for seed in range(20)} == {3}
    for seed in range(20):
        call, feedback, last = retry_turns(seed, skill=0.0, oracle=0.0)
        assert "is well formed" in feedback
        assert call.split('"')[-2] == last[len("Answer: \\boxed{") : -1], "it keeps its guess"


def test_confirming_trains_only_the_reply_that_repeats_the_checked_answer() -> None:
    problem = tiny_problem(shape="square", quantity="area", label=4)
    lengths = set()
    for seed in range(20):
        *before, last = demonstrations("confirm", problem, random.Random(seed), RETRY).turns
        assert last == Say("Answer: \\boxed{16}")
        assert "The answer 16 is correct" in before[-1].text
        assert [turn.trained for turn in before if isinstance(turn, Say)] == [()] * (
            len(before) // 2
        )
        lengths.add(len(before))
    assert lengths == {2, 4}, "at once, or after a wrong one"


def test_the_tokenizer_texts_hold_every_feedback_of_the_environment() -> None:
    said = " ".join(texts())
    for oracle in (True, False):
        env = Geo3kEnv("16", oracle=oracle, max_turns=9)
        for answer in ("16", "25"):
            assert env.step(tool_call(answer))[0].text in said


def test_a_small_models_tokenizer_can_learn_the_feedback() -> None:  # model.small.texts
    feedback = Geo3kEnv("16", max_turns=2).step(tool_call("16"))[0].text
    own = load_object("polyturn.envs.geo3k:texts", "model.small.texts")()
    lengths = [
        len(train_tokenizer(said, 512)(feedback)["input_ids"])
        for said in (list(corpus(tiny.problems())), [*corpus(tiny.problems()), *own])  # type: ignore[misc]
    ]
    assert lengths[1] < 0.5 * lengths[0]


def test_demonstrations_alternate_and_spans_lie_in_the_reply() -> None:
    observation = Message("tool", ("seen",))
    Demonstration((), (Say("a"), observation, Say("b", ((0, 1),))), "k")
    for turns in ((), (observation,), (Say("a"), Say("b"), Say("c")), (Say("a"), observation)):
        with pytest.raises(ValueError, match="alternate"):
            Demonstration((), turns, "k")
    for spans in (((0, 9),), ((1, 1),), ((1, 2), (0, 1)), ((-1, 1),)):
        with pytest.raises(ValueError, match="trained spans"):
            Say("abc", spans)
