"""Environments that fail: statuses, fresh attempts inside a budget, counts; never a crash or a stuck run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyturn.params import EnvParams, RolloutParams
from polyturn.render import Renderer
from polyturn.rollout import Draw, FailureBudgetError, RolloutSettings, rollout
from polyturn.sampler.base import SampleRequest
from polyturn.training.metrics import rollout_metrics
from polyturn.types import EnvFailures, Group, StopReason, Trajectory
from tests.unit import tiny
from tests.unit.envs import flaky_envs
from tests.unit.tiny import ScriptedSampler

PROBLEMS = tiny.problems(2)
FIRST = PROBLEMS[0].id
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    flaky_envs.CALLS.clear()
    flaky_envs.CLOSED.clear()


def settings(
    *, retries: int, budget: float = 0.0, limit_s: float = 5.0, build: str = "flaky", **env: object
) -> RolloutSettings:
    return RolloutSettings(
        EnvParams(
            build=f"tests.unit.envs.flaky_envs:build_{build}",
            params=env,
            tools_in_prompt=False,
            step_timeout_s=limit_s,
            retries=retries,
            max_failure_fraction=budget,
        ),
        RolloutParams(max_turns=3, max_turn_tokens=None),
        tiny.params().reward,
    )


def script(request: SampleRequest, turn: int) -> str:
    return ("a", "done \\boxed{1}")[turn]


def play(
    renderer: Renderer, using: RolloutSettings, size: int = 2
) -> tuple[list[Trajectory], ScriptedSampler, list[Group]]:
    sampler = ScriptedSampler(renderer, script)
    groups = asyncio.run(rollout(PROBLEMS, sampler, renderer, using, Draw(5, size, 1.0)))
    return [t for group in groups for t in group.trajectories], sampler, groups


@pytest.mark.parametrize("place", ["build", "reset", "step"])
def test_a_failed_trajectory_is_tried_again_from_its_start(renderer: Renderer, place: str) -> None:
    using = settings(retries=1, place=place, fails=2, only=FIRST)  # both siblings' first attempts
    trajectories, sampler, groups = play(renderer, using)
    assert [t.stop_reason for t in trajectories] == [StopReason.ENV_DONE] * 4
    assert [len(t.turns) for t in trajectories] == [2] * 4, "whole, not the rest of one"
    failed_once = EnvFailures(num_errors=1, num_retries=1)
    assert [t.env_failures for t in trajectories] == [failed_once] * 2 + [EnvFailures()] * 2
    assert all(t.error is None for t in trajectories)
    metrics = rollout_metrics(groups, seed=0)
    counted = [metrics[f"env/{n}"] for n in ("errors", "timeouts", "close_failures", "retries")]
    assert counted == [2, 0, 0, 2]
    asked = {request.session for call in sampler.requests for request in call}
    assert {"0/0/1", "0/1/1"} <= asked, "a sampler does not take a new attempt for an old session"


def test_an_attempt_has_seeds_of_its_own_and_other_trajectories_keep_theirs(
    renderer: Renderer,
) -> None:
    def seeds(**env: object) -> dict[str, int]:
        flaky_envs.CALLS.clear()
        _, sampler, _ = play(renderer, settings(retries=1, only=FIRST, **env))
        return {request.session: request.seed for request in sampler.requests[0]} | {
            request.session: request.seed for call in sampler.requests[2:] for request in call[:1]
        }

    calm, failing = seeds(), seeds(place="step", fails=1)
    assert {key: failing[key] for key in calm} == calm
    (again,) = failing.keys() - calm.keys()
    assert failing[again] != failing[again[:3]]


def test_trajectories_that_did_not_fail_are_the_same_with_and_without_retries(
    renderer: Renderer,
) -> None:
    calm, _, _ = play(renderer, settings(retries=0))
    flaky_envs.CALLS.clear()
    failing, sampler, _ = play(renderer, settings(retries=1, place="step", fails=2, only=FIRST))
    assert [t.token_ids.tolist() for t in failing[2:]] == [t.token_ids.tolist() for t in calm[2:]]
    lengths = [len(call) for call in sampler.requests]
    assert lengths == [4, 2, 2, 2], "new attempts are sampled after the others have ended"


def test_attempts_are_limited_and_what_still_fails_counts_against_the_budget(
    renderer: Renderer,
) -> None:
    using = settings(retries=2, budget=0.5, place="step", fails=99, only=FIRST)
    trajectories, _, _ = play(renderer, using)
    assert [t.stop_reason for t in trajectories] == [StopReason.ENV_ERROR] * 2 + [
        StopReason.ENV_DONE
    ] * 2
    assert trajectories[0].env_failures == EnvFailures(num_errors=3, num_retries=2)
    assert trajectories[0].reward is None
    assert "ConnectionError: step is down" in (trajectories[0].error or "")
    flaky_envs.CALLS.clear()
    with pytest.raises(FailureBudgetError, match=r"2 of 4 trajectories failed.*step is down"):
        play(renderer, settings(retries=2, budget=0.4, place="step", fails=99, only=FIRST))


def test_every_attempt_is_closed(renderer: Renderer) -> None:
    play(renderer, settings(retries=1, place="step", fails=1, only=FIRST), size=2)
    assert sorted(flaky_envs.CLOSED) == sorted([FIRST] * 3 + [PROBLEMS[1].id] * 2)


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_close_that_fails_or_hangs_is_counted_and_changes_nothing_else(
    renderer: Renderer, how: str
) -> None:
    using = settings(retries=1, limit_s=0.3, place="close", fails=99, only=FIRST, how=how)
    trajectories, _, groups = play(renderer, using)
    assert [t.stop_reason for t in trajectories] == [StopReason.ENV_DONE] * 4
    assert trajectories[0].env_failures == EnvFailures(num_close_failures=1), "and no new attempt"
    assert rollout_metrics(groups, seed=0)["env/close_failures"] == 2


def test_a_step_that_hangs_is_a_timeout_and_is_tried_again(renderer: Renderer) -> None:
    using = settings(retries=1, limit_s=0.3, place="step", fails=2, only=FIRST, how="hang")
    started = time.monotonic()
    trajectories, _, groups = play(renderer, using)
    assert time.monotonic() - started < 5
    assert [t.stop_reason for t in trajectories] == [StopReason.ENV_DONE] * 4
    assert trajectories[0].env_failures == EnvFailures(num_timeouts=1, num_retries=1)
    assert rollout_metrics(groups, seed=0)["env/timeouts"] == 2


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("block", StopReason.ENV_TIMEOUT),
        ("ignore", StopReason.ENV_TIMEOUT),
        ("cancel", StopReason.ENV_ERROR),
    ],
)
def test_no_coroutine_holds_up_or_cancels_the_rollout(
    renderer: Renderer, how: str, reason: StopReason
) -> None:
    started = time.monotonic()
    using = settings(retries=0, budget=1.0, limit_s=0.3, build="rude", how=how)
    trajectories, _, _ = play(renderer, using, size=2)
    assert time.monotonic() - started < 2.5, "not until the environment gives up control"
    assert {t.stop_reason for t in trajectories} == {reason}
    if how == "block":
        time.sleep(max(0.0, started + 3.6 - time.monotonic()))  # leave the shared loop free again


HANGING = """
import asyncio, time
from polyturn.envs.call import Caller
async def rude():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
async def main():
    for method in (lambda: time.sleep(3600), rude):
        try:
            await Caller().call(method, time_limit_s=0.2)
        except TimeoutError:
            print("timeout")
asyncio.run(main())
"""


def test_the_process_ends_although_a_step_never_does() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.split() == ["timeout", "timeout"]
