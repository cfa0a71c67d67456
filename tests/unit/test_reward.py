"""Reward terms: weights, what they may read, failures that are counted, and a light import."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

from polyturn.params import RewardParams, RewardTermParams
from polyturn.reward import (
    Reward,
    RewardFailureError,
    boxed,
    check_failures,
    correctness,
    score,
)
from polyturn.types import Json, Message, Problem, StopReason, Trajectory, Turn

PROBLEM = Problem("p1", "train", (Message("user", ("Find x.",)),), "3 \\sqrt { 2 }")


def trajectory(
    *replies: str, observation: str = "", info: dict[str, Json] | None = None
) -> Trajectory:
    turns = tuple(
        Turn((1,), (0.0,), reply, Message("tool", (observation,)), info or {}) for reply in replies
    )
    return Trajectory(
        problem=PROBLEM,
        group_index=0,
        sibling=0,
        turns=turns,
        token_ids=np.zeros(1, np.int64),
        loss_mask=np.zeros(1, np.int8),
        logprobs=np.zeros(1, np.float32),
        images=(),
        stop_reason=StopReason.ENV_DONE,
        policy_version=0,
    )


@pytest.fixture
def terms(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user's module of reward terms."""
    module = types.ModuleType("user_terms")
    module.turns = lambda trajectory, problem: -len(trajectory.turns)  # type: ignore[attr-defined]
    module.zoomed = lambda trajectory, problem: trajectory.turns[0].info.get("zoomed", 0)  # type: ignore[attr-defined]
    module.broken = lambda trajectory, problem: 1 / 0  # type: ignore[attr-defined]
    module.endless = lambda trajectory, problem: float("inf")  # type: ignore[attr-defined]
    module.with_params = lambda trajectory, problem, params: params.tolerance  # type: ignore[attr-defined]
    module.odd = lambda trajectory, problem, weights: 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_terms", module)
    return module


def params(*items: tuple[str, float], **others: float) -> RewardParams:
    return RewardParams(
        terms=tuple(RewardTermParams(term=term, weight=weight) for term, weight in items), **others
    )  # type: ignore[arg-type]


def test_correctness_is_one_for_the_right_answer_of_the_last_reply() -> None:
    right = trajectory("Let me see.", "Answer: \\boxed{\\sqrt{18}}")
    assert score(right, PROBLEM, RewardParams()) == Reward(1.0, {"correctness": 1.0})
    wrong = trajectory("Answer: \\boxed{3\\sqrt{2}}", "Answer: \\boxed{5}")
    assert score(wrong, PROBLEM, RewardParams()).total == 0.0


def test_a_box_is_well_formed_whatever_it_holds() -> None:
    for replies, value in (
        (["\\boxed{1}"], 1.0),
        (["no box"], 0.0),
        (["\\boxed{1", "\\boxed{2"], 0.0),
        ([], 0.0),
    ):
        assert boxed(trajectory(*replies), PROBLEM) == value


def test_only_assistant_text_is_graded() -> None:
    box = "\\boxed{3\\sqrt{2}}"
    assert (
        correctness(
            trajectory("The answer is \\sqrt{18}", observation="not \\boxed{5}"),
            PROBLEM,
            params=RewardParams(),
        )
        == 1.0
    )
    assert (
        correctness(trajectory("I do not know.", observation=box), PROBLEM, params=RewardParams())
        == 0.0
    )
    call = '<tool_call>{"name": "calc_score", "arguments": {"answer": "3\\sqrt{2}"}}</tool_call>'
    assert correctness(trajectory(call), PROBLEM, params=RewardParams()) == 0.0, (
        "a call's argument is no answer"
    )
    assert correctness(trajectory(box, call), PROBLEM, params=RewardParams()) == 0.0, (
        "nor is an earlier turn's"
    )
    assert correctness(trajectory(), PROBLEM, params=RewardParams()) == 0.0


def test_an_environment_may_say_that_a_call_submitted_the_answer() -> None:
    submitted = trajectory("I submit.", info={"final_answer": "3\\sqrt{2}"})
    assert correctness(submitted, PROBLEM, params=RewardParams(needs_box=True)) == 1.0
    assert (
        correctness(
            trajectory("\\boxed{\\sqrt{18}}", info={"final_answer": "5"}),
            PROBLEM,
            params=RewardParams(),
        )
        == 0.0
    )


def test_params_reach_correctness() -> None:
    decimal = Problem("p2", "train", (), "4.24")
    exact = trajectory("\\boxed{3\\sqrt{2}}")
    assert correctness(exact, decimal, params=RewardParams()) == 1.0
    assert correctness(exact, decimal, params=RewardParams(rounding="strict")) == 0.0
    assert (
        correctness(trajectory("\\boxed{4.2}"), decimal, params=RewardParams(tolerance=0.02)) == 1.0
    )
    assert correctness(trajectory("4.24"), decimal, params=RewardParams(needs_box=True)) == 0.0


def test_terms_are_weighted_and_kept_apart(terms: types.ModuleType) -> None:
    section = params(
        ("polyturn.reward:correctness", 1.0), ("user_terms:turns", 0.1), ("user_terms:zoomed", 0.5)
    )
    reward = score(
        trajectory("\\boxed{5}", "\\boxed{\\sqrt{18}}", info={"zoomed": 1}), PROBLEM, section
    )
    assert reward.terms == {"correctness": 1.0, "turns": -2.0, "zoomed": 1.0}
    assert reward.total == pytest.approx(1.0 - 0.2 + 0.5)


def test_a_term_takes_params_when_it_names_them(terms: types.ModuleType) -> None:
    assert (
        score(
            trajectory("x"), PROBLEM, params(("user_terms:with_params", 1.0), tolerance=0.25)
        ).total
        == 0.25
    )
    with pytest.raises(
        ValueError, match=r"reward\.terms\[0\]\.term: user_terms:odd has arguments \['weights'\]"
    ):
        score(trajectory("x"), PROBLEM, params(("user_terms:odd", 1.0)))
    with pytest.raises(ValueError, match=r"reward\.terms\[0\]\.term.*no callable 'missing'"):
        score(trajectory("x"), PROBLEM, params(("user_terms:missing", 1.0)))


def test_a_failing_term_counts_zero_and_is_recorded(terms: types.ModuleType) -> None:
    section = params(
        ("user_terms:broken", 1.0),
        ("user_terms:endless", 1.0),
        ("polyturn.reward:correctness", 1.0),
    )
    reward = score(trajectory("\\boxed{\\sqrt{18}}"), PROBLEM, section)
    assert reward.total == 1.0
    assert reward.failures == (
        "broken: ZeroDivisionError: division by zero",
        "endless: ValueError: the term returned inf",
    )


def test_a_grader_failure_is_recorded_with_its_cause() -> None:
    symbolic = Problem("p3", "train", (), "x+1")
    answer = trajectory("\\boxed{x^{7^{7^{7^{7^{7}}}}} + 1}")
    reward = score(answer, symbolic, RewardParams(timeout_s=0.001))
    assert reward.total == 0.0
    assert "GraderError: symbolic comparison took more than 0.001 s" in reward.failures[0]


def test_too_many_failures_stop_the_step_with_the_cause() -> None:
    good, bad = (), ("correctness: GraderError: slow",)
    section = params(("polyturn.reward:correctness", 1.0), max_failure_fraction=0.25)
    check_failures([good, good, good, bad], section)
    check_failures([], section)
    with pytest.raises(
        RewardFailureError,
        match=r"max_failure_fraction is 0\.25, but 2 of 4 .*cause: correctness: GraderError: slow",
    ):
        check_failures([good, good, bad, bad], section)


def test_importing_the_reward_loads_neither_torch_nor_sympy() -> None:
    code = "import sys, polyturn.reward; print([m for m in ('torch', 'sympy', 'math_verify', 'pydantic') if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="."
    )
    assert shown.stdout.strip() == "[]"
