"""Rollouts: lockstep and order, groups, grading, and how much may fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from polyturn import rollout as rollout_module
from polyturn.advantage import group_advantages
from polyturn.comparator import ComparisonError
from polyturn.envs.base import Observation
from polyturn.episode import Episode
from polyturn.params import EnvParams, RolloutParams
from polyturn.render import Rendered, Renderer
from polyturn.rollout import (
    Draw,
    FailureBudgetError,
    RolloutSettings,
    attempts_of,
    rollout,
    rollout_attempts,
)
from polyturn.sampler.base import Sampler, SampleRequest
from polyturn.samples import with_gradient
from polyturn.training.metrics import rollout_metrics
from polyturn.types import Group, Message, Status, StopReason
from tests.unit import tiny
from tests.unit.tiny import Scripted, ScriptedSampler

PROBLEMS = tiny.problems(2)


def settings(max_failure_fraction: float = 0.0, **env: object) -> RolloutSettings:
    return RolloutSettings(
        EnvParams(
            build="tests.unit.toy_envs:build_talker",
            params=env,
            tools_in_prompt=False,
            max_failure_fraction=max_failure_fraction,
        ),
        RolloutParams(max_turns=3, max_turn_tokens=None),
        tiny.params().reward,
    )


def play(
    sampler: ScriptedSampler, renderer: Renderer, using: RolloutSettings, size: int = 3
) -> list[Group]:
    return asyncio.run(rollout(PROBLEMS, sampler, renderer, using, Draw(5, size, 1.0)))


def by_session(said: Mapping[str, tuple[str | Scripted, ...]]) -> tiny.Script:
    """Replies by trajectory; all others answer with the right number at once."""

    def script(request: SampleRequest, turn: int) -> str | Scripted:
        if request.session in said:
            return said[request.session][turn]
        return f"\\boxed{{{PROBLEMS[int(request.session[0])].answer}}}"

    return script


def test_siblings_that_go_on_by_themselves_set_out_apart(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server computes the prompt of siblings once if the first is well ahead of the second."""
    sampler = ScriptedSampler(renderer, by_session({}), is_lockstep=False)
    play_alone, set_out = rollout_module._play_alone, list[str]()

    async def watched(episode: Episode, using: Sampler) -> None:
        set_out.append(episode.session)
        await play_alone(episode, using)

    monkeypatch.setattr(rollout_module, "_play_alone", watched)
    groups = play(sampler, renderer, settings())
    assert set_out == ["0/0", "1/0", "0/1", "1/1", "0/2", "1/2"]
    order = [(t.group_index, t.sibling) for group in groups for t in group.trajectories]
    assert order == [(group, sibling) for group in (0, 1) for sibling in (0, 1, 2)]


def test_live_trajectories_are_asked_together_in_group_and_sibling_order(
    renderer: Renderer,
) -> None:
    script = by_session({"0/1": ("a", "b", "box"), "1/2": ("a", "box"), "1/0": ("a", "box")})
    sampler = ScriptedSampler(renderer, script)
    groups = play(sampler, renderer, settings())
    asked = [[request.session for request in call] for call in sampler.requests]
    assert asked == [
        ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"],
        ["0/1", "1/0", "1/2"],
        ["0/1"],
    ]
    assert [(g.index, [t.sibling for t in g.trajectories]) for g in groups] == [
        (0, [0, 1, 2]),
        (1, [0, 1, 2]),
    ]
    assert [[len(t.turns) for t in group.trajectories] for group in groups] == [
        [1, 3, 1],
        [2, 1, 2],
    ]


def test_right_answers_are_rewarded_and_wrong_ones_not(renderer: Renderer) -> None:
    sampler = ScriptedSampler(renderer, by_session({"0/1": ("\\boxed{99999}",)}))
    groups = play(sampler, renderer, settings())
    assert [[t.reward for t in group.trajectories] for group in groups] == [[1, 0, 1], [1, 1, 1]]
    assert groups[0].trajectories[1].reward_terms == {"correctness": 0.0}


def test_seeds_depend_on_problem_sibling_and_turn_not_on_the_batch(renderer: Renderer) -> None:
    def seeds(problems: tuple[object, ...]) -> dict[tuple[str, str], int]:
        sampler = ScriptedSampler(renderer, by_session({"0/0": ("a", "box")}))
        groups = asyncio.run(
            rollout(problems, sampler, renderer, settings(), Draw(5, 2, 1.0))  # type: ignore[arg-type]
        )
        ids = [group.trajectories[0].problem.id for group in groups]
        return {(ids[int(r.session[0])], r.session[2:]): r.seed for r in sampler.requests[0]}

    both, second = seeds(PROBLEMS), seeds(PROBLEMS[1:])
    assert {key: both[key] for key in second} == second
    assert len(set(both.values())) == 4


def test_some_groups_of_a_step_come_out_as_with_all_of_them(renderer: Renderer) -> None:
    """A rank samples the groups that it owns: indices, seeds and trajectories stay those of the whole step."""
    drawn = (PROBLEMS[0], PROBLEMS[1], PROBLEMS[0])
    attempts = attempts_of(drawn)
    assert [(a.group_index, a.occurrence) for a in attempts] == [(0, 0), (1, 0), (2, 1)]

    def seeds(indices: list[int]) -> dict[str, int]:
        sampler = ScriptedSampler(renderer, lambda *_: "box")
        owned = [attempts[index] for index in indices]
        groups = asyncio.run(
            rollout_attempts(owned, sampler, renderer, settings(), Draw(5, 2, 1.0))
        )
        assert [group.index for group in groups] == indices
        assert [t.group_index for g in groups for t in g.trajectories] == [
            index for index in indices for _ in range(2)
        ]
        return {request.session: request.seed for request in sampler.requests[0]}

    whole = seeds([0, 1, 2])
    assert len(set(whole.values())) == 6
    assert seeds([0, 2]) | seeds([1]) == whole


def test_aborted_trajectory_has_no_reward_and_leaves_the_baseline(renderer: Renderer) -> None:
    """One of four aborted before scoring: a status, no assertion (slime #70)."""
    script = by_session({"0/1": (Scripted((1, 2), "abort"),), "0/2": ("\\boxed{99999}",)})
    (group, _) = play(ScriptedSampler(renderer, script), renderer, settings(1 / 8), size=4)
    aborted = group.trajectories[1]
    assert (aborted.status, aborted.reward) == (Status.ABORTED, None)
    advantages = group_advantages([t.reward for t in group.trajectories], normalize_std=False)
    assert advantages == [pytest.approx(1 / 3), None, pytest.approx(-2 / 3), pytest.approx(1 / 3)]
    assert len(with_gradient([group], [advantages])) == 3


def test_truncated_trajectories_are_graded_and_counted(renderer: Renderer) -> None:
    cut = Scripted(renderer.encode("I think"), "length")
    groups = play(ScriptedSampler(renderer, by_session({"0/0": ("a", cut)})), renderer, settings())
    truncated = groups[0].trajectories[0]
    assert (truncated.status, truncated.reward) == (Status.TRUNCATED, 0.0)
    metrics = rollout_metrics(groups, seed=0)
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 6)
    assert metrics["rollout/stop/max_new_tokens"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "said",
    [
        "bad",
        Scripted((1,), "error", error="gone"),
        Scripted((1,), "error"),
        Scripted((1,), "abort", error="Out of memory even after retracting all other requests"),
    ],
    ids=["environment", "engine", "engine without a word", "aborted by the engine"],
)
def test_failures_within_the_budget_are_data_above_it_they_stop(
    renderer: Renderer, said: str | Scripted
) -> None:
    """An engine aborts its longest replies for want of memory (sgl-project/sglang#19881): no step may lose many of them."""
    script = by_session({"0/0": (said,)})
    groups = play(ScriptedSampler(renderer, script), renderer, settings(1 / 6))
    assert not groups[0].trajectories[0].status.is_rewarded
    assert groups[0].trajectories[0].reward is None
    with pytest.raises(FailureBudgetError, match=r"env.max_failure_fraction is 0.1, but 1 of 6"):
        play(ScriptedSampler(renderer, script), renderer, settings(0.1))


def test_environments_that_cannot_be_built_fail_their_trajectories(renderer: Renderer) -> None:
    groups = play(
        ScriptedSampler(renderer, by_session({})),
        renderer,
        settings(0.5, broken=[PROBLEMS[0].id]),
    )
    assert {t.stop_reason for t in groups[0].trajectories} == {StopReason.ENV_ERROR}
    assert {t.stop_reason for t in groups[1].trajectories} == {StopReason.ENV_DONE}


def test_environments_are_closed_side_by_side(renderer: Renderer) -> None:
    using = settings(close_s=0.3)
    started = time.monotonic()
    play(ScriptedSampler(renderer, by_session({})), renderer, using)
    assert time.monotonic() - started < 1.2  # one after the other: 6 x 0.3 s


def test_an_unknown_environment_is_named_with_its_key(renderer: Renderer) -> None:
    using = settings()
    env = using.env.model_copy(update={"build": "tests.unit.toy_envs:nothing"})
    with pytest.raises(ValueError, match=r"env.build: tests.unit.toy_envs has no callable"):
        asyncio.run(
            rollout(
                PROBLEMS,
                ScriptedSampler(renderer, tiny.saying()),
                renderer,
                RolloutSettings(env, using.rollout, using.reward),
                Draw(5, 2, 1.0),
            )
        )


def test_turn_observation_is_what_the_policy_saw(renderer: Renderer) -> None:
    groups = play(
        ScriptedSampler(renderer, by_session({"0/0": ("a", "box")})), renderer, settings()
    )
    first = groups[0].trajectories[0].turns[0].observation
    assert first is not None
    assert first.text == Observation("ok").text


def test_a_share_of_the_trajectories_is_compared_with_the_rendered_conversation(
    renderer: Renderer,
) -> None:
    """Chosen by their seeds: the same ones again, all of them or none at the ends."""

    def compared(fraction: float) -> list[bool]:
        using = settings()
        using = replace(
            using, rollout=using.rollout.model_copy(update={"compare_fraction": fraction})
        )
        groups = play(ScriptedSampler(renderer, by_session({})), renderer, using, size=30)
        trajectories = [t for group in groups for t in group.trajectories]
        assert {t.num_rewritten for t in trajectories} <= {0, None}
        return [t.num_rewritten == 0 for t in trajectories]

    assert sum(compared(0.0)) == 0
    assert sum(compared(1.0)) == 60
    chosen = compared(0.3)
    assert 8 <= sum(chosen) <= 28
    assert compared(0.3) == chosen


def test_a_stream_that_is_not_the_conversation_stops_the_step(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    observation = Renderer.observation

    def without_newline(self: Renderer, message: Message) -> Rendered:
        shown = observation(self, message)
        return Rendered(shown.engine_ids[1:], shown.token_ids[1:], shown.images)

    monkeypatch.setattr(Renderer, "observation", without_newline)
    using = settings()
    using = replace(using, rollout=using.rollout.model_copy(update={"compare_fraction": 1.0}))
    script = by_session({"1/2": ("a", "box")})
    with pytest.raises(
        ComparisonError, match="problem train-1 group 1 sibling 2: token ids differ"
    ):
        play(ScriptedSampler(renderer, script), renderer, using)


def test_weights_of_another_version_fail_their_trajectories(renderer: Renderer) -> None:
    def versions(*, expected: int | None, changes: bool) -> Counter[StopReason]:
        sampler = ScriptedSampler(renderer, by_session({"0/0": ("a", "box")}), version=3)

        def script(request: SampleRequest, turn: int) -> str | Scripted:
            sampler.version += int(changes and turn == 1)
            return by_session({"0/0": ("a", "box")})(request, turn)

        sampler.script = script
        draw = Draw(5, 2, 1.0, policy_version=expected)
        groups = asyncio.run(rollout(PROBLEMS, sampler, renderer, settings(1.0), draw))
        return Counter(t.stop_reason for group in groups for t in group.trajectories)

    assert versions(expected=3, changes=False) == {StopReason.ENV_DONE: 4}
    assert versions(expected=None, changes=False) == {StopReason.ENV_DONE: 4}
    assert versions(expected=4, changes=False) == {StopReason.SAMPLER_ERROR: 4}
    assert versions(expected=None, changes=True) == {
        StopReason.ENV_DONE: 3,
        StopReason.SAMPLER_ERROR: 1,
    }
