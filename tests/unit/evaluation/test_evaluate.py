"""Scores of a policy, by hand-counted numbers, and what the seeds of an evaluation depend on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyturn.evaluation.evaluate import (
    EvaluationPlan,
    evaluate,
    evaluation_settings,
    is_correct,
    summarize,
)
from polyturn.evaluation.statistics import bootstrap_interval
from polyturn.params import Params
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.rollout import FailureBudgetError
from polyturn.sampler.base import SampleRequest
from polyturn.training.validation import validate
from polyturn.types import Group, Message, Problem, StopReason, Trajectory, Turn
from tests.unit import tiny
from tests.unit.loop import Run
from tests.unit.tiny import ScriptedSampler

PROBLEMS = tiny.problems(4, "validation")
PLAN = EvaluationPlan(
    seed=3, samples_per_problem=4, temperature=1.0, batch_size=8, bootstrap_samples=200
)


def trajectory(
    reward: float | None, turns: int = 1, stop: StopReason = StopReason.ENV_DONE
) -> Trajectory:
    mask = np.array([0, *[1] * turns * 2], np.int8)
    return Trajectory(
        problem=Problem("p", "test", (Message("user", ("Find x.",)),), "12"),
        group_index=0,
        sibling=0,
        turns=(Turn((1, 2), (-1.0, -1.0), "a", None),) * turns,
        token_ids=np.zeros(len(mask), np.int64),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        images=(tiny.picture(),) * turns,
        stop_reason=stop,
        policy_version=0,
        reward=reward,
    )


def test_summary_by_hand() -> None:
    """Three, one and no right of four tries; one failed, one truncated."""
    groups = [
        Group(0, (trajectory(1.0, 2), trajectory(1.0), trajectory(1.0), trajectory(0.0))),
        Group(1, (trajectory(0.0), trajectory(0.99), trajectory(1.0, 3), trajectory(0.0))),
        Group(
            2,
            (
                trajectory(None, stop=StopReason.ENV_ERROR),
                trajectory(0.0, stop=StopReason.MAX_CONTEXT),
                trajectory(0.0),
                trajectory(0.0),
            ),
        ),
    ]
    summary = summarize(groups, PLAN)
    shares = [0.75, 0.25, 0.0]
    interval = bootstrap_interval(shares, num_samples=200, seed=3)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert (summary["accuracy_low"], summary["accuracy_high"]) == (interval.low, interval.high)
    assert summary["pass@1"] == pytest.approx(1 / 3)
    assert summary["pass@2"] == pytest.approx((1.0 + 0.5 + 0.0) / 3)  # 1 - C(wrong, 2) / C(4, 2)
    assert summary["pass@4"] == pytest.approx(2 / 3)
    assert summary["turns_mean"] == pytest.approx(15 / 12)
    assert summary["tokens_mean"] == pytest.approx(30 / 12)
    assert summary["images_mean"] == pytest.approx(15 / 12)
    assert summary["truncated_fraction"] == pytest.approx(1 / 12)
    assert summary["failed_fraction"] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("reward", "terms", "solved"),
    [
        (None, {}, False),
        (0.0, {}, False),
        (0.99, {}, False),
        (1.0, {}, True),
        (1.2, {}, True),
        (0.1, {"correctness": 0.0, "boxed": 1.0}, False),
        (0.5, {"correctness": 1.0, "boxed": 0.0}, True),
        (1.5, {"correctness": 0.0, "bonus": 1.0}, False),
        (0.7 + 0.2 + 0.1, {"solved": 1.0, "boxed": 1.0, "short": 1.0}, True),  # 0.9999999999999999
        (0.999, {}, False),
    ],
)
def test_a_try_is_correct_by_the_correctness_term_if_there_is_one(
    reward: float | None, terms: dict[str, float], solved: bool
) -> None:
    assert is_correct(replace(trajectory(reward), reward_terms=terms)) is solved


def play(
    renderer: Renderer,
    params: Params,
    plan: EvaluationPlan,
    problems: tuple[Problem, ...] = PROBLEMS,
) -> tuple[list[Group], list[tuple[str, int, float]], list[int]]:
    """Groups; (picture, seed, temperature) of every request; how many problems were heard of at a time."""
    answers = {p.images[0].sha256: p.answer for p in PROBLEMS}

    def script(request: SampleRequest, _: int) -> str:
        return f"\\boxed{{{answers[request.images[0].sha256]}}}"

    class Forgetful(ScriptedSampler):
        async def generate(self, requests):  # type: ignore[no-untyped-def]
            self.turns.clear()
            return await super().generate(requests)

    sampler = Forgetful(renderer, script)
    heard: list[int] = []
    groups = asyncio.run(
        evaluate(problems, sampler, renderer, evaluation_settings(params), plan, heard.append)
    )
    asked = [(r.images[0].sha256, r.seed, r.temperature) for call in sampler.requests for r in call]
    return groups, asked, heard


def test_every_problem_is_tried_in_order_and_in_batches(renderer: Renderer) -> None:
    groups, asked, heard = play(renderer, tiny.params(), PLAN)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [group.trajectories[0].problem.id for group in groups] == [p.id for p in PROBLEMS]
    assert [len(group.trajectories) for group in groups] == [4] * 4
    assert heard == [2, 2]
    assert len(set(asked)) == 16
    assert summarize(groups, PLAN)["accuracy"] == 1.0


def test_the_budget_of_failures_is_of_the_whole_evaluation(renderer: Renderer) -> None:
    """One try of nine fails, alone in the last batch (prime-rl#1448 and SkyRL#1986 lose whole batches to one)."""
    problems = tiny.problems(9, "validation")
    plan = replace(PLAN, samples_per_problem=1)

    def failing(*indices: int, budget: float) -> int:
        env = {
            "build": "tests.unit.toy_envs:build_talker",
            "params": {"broken": [problems[index].id for index in indices]},
            "max_failure_fraction": budget,
        }
        sampler = ScriptedSampler(renderer, tiny.saying("\\boxed{1}"))
        heard: list[int] = []
        settings = evaluation_settings(tiny.params(env=env))
        with suppress(FailureBudgetError):
            asyncio.run(evaluate(problems, sampler, renderer, settings, plan, heard.append))
        return sum(heard)

    assert failing(8, budget=0.12) == 9
    assert failing(8, budget=0.1) == 8, "1 of 9 is more"
    assert failing(0, 1, budget=0.23) == 9, "2 of 9; of the first eight they are a quarter"
    assert failing(0, 1, budget=0.2) == 0, "no later batch could make it good"


def test_seeds_of_an_evaluation_depend_neither_on_batches_nor_on_other_problems(
    renderer: Renderer,
) -> None:
    _, asked, _ = play(renderer, tiny.params(), PLAN)
    _, large, _ = play(renderer, tiny.params(), replace(PLAN, batch_size=100))
    _, later, _ = play(renderer, tiny.params(), PLAN, PROBLEMS[1:])
    assert sorted(large) == sorted(asked)
    assert set(later) < set(asked)


def test_greedy_is_temperature_zero(renderer: Renderer) -> None:
    greedy = replace(PLAN, samples_per_problem=1, temperature=0.0)
    groups, asked, _ = play(renderer, tiny.params(), greedy)
    assert {temperature for _, _, temperature in asked} == {0.0}
    assert sorted(name for name in summarize(groups, greedy) if "@" in name) == ["pass@1"]


def test_evaluation_has_environment_params_of_its_own() -> None:
    params = tiny.params(
        env={
            "params": {"crop_fraction": 0.25, "oracle": True},
            "eval_params": {"oracle": False},
        },
    )
    settings = evaluation_settings(params)
    assert settings.env.params == {"crop_fraction": 0.25, "oracle": False}
    assert params.env.params["oracle"] is True
    assert settings.rollout == params.rollout


def test_validation_uses_the_same_seeds_at_every_version(policy: Policy, tmp_path: Path) -> None:
    parts = Run(tmp_path, tiny.params(), policy).parts()
    asked = []
    for version in (0, 20):
        sampler = ScriptedSampler(parts.renderer, tiny.saying("\\boxed{1}"), version=version)
        tried = replace(parts, sampler=sampler, validation=PROBLEMS)
        score, metrics = asyncio.run(validate(tried, tiny.params(), version))
        assert score.version == version
        assert metrics["eval/accuracy"] == score.accuracy
        assert metrics["eval/accuracy_low"] == score.accuracy_low
        asked.append([request.seed for call in sampler.requests for request in call])
    assert asked[0] == asked[1]
