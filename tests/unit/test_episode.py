"""One trajectory: masks and logprobs token by token, limits, and environments that go wrong."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.envs.base import Observation
from polyturn.envs.zoom import TOOLS
from polyturn.episode import Episode, EpisodeSettings
from polyturn.params import EnvParams, RolloutParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.sampler.base import FinishReason
from polyturn.types import ImageRecord, Message, Problem, Status, StopReason, Trajectory
from tests.unit import templates, tiny
from tests.unit.tiny import Scripted, ScriptedSampler

PROBLEM = Problem("p", "train", (Message("user", (tiny.picture(), "Find x.")),), "12")
LIMITS = RolloutParams(
    max_turns=4, max_new_tokens=100, max_turn_tokens=None, max_context_tokens=500
)


class Scenes:
    """An environment that answers with the given scenes and is done after the last (None: done)."""

    def __init__(self, *scenes: object) -> None:
        self.scenes = list(scenes)
        self.heard: list[str] = []

    def step(self, response_text: str) -> tuple[object, bool, dict[str, object]]:
        self.heard.append(response_text)
        scene = self.scenes.pop(0) if self.scenes else None
        return scene, scene is None, {"heard": len(self.heard)}


def run(
    renderer: Renderer,
    env: object | Callable[[], object],
    script: tiny.Script,
    *,
    limits: RolloutParams = LIMITS,
    timeout_s: float = 30.0,
    tools: bool = False,
    problem: Problem = PROBLEM,
) -> tuple[Trajectory, ScriptedSampler]:
    """One episode from start to finish, and the sampler with what it was asked."""
    env_params = EnvParams(tools_in_prompt=tools, step_timeout_s=timeout_s)
    build = env if callable(env) else lambda: env
    shared = EpisodeSettings(renderer, build, env_params, limits, 7, 1.0)
    sampler = ScriptedSampler(renderer, script)

    async def play() -> Trajectory:
        episode = Episode(shared, problem, 0, 0)
        await episode.start()
        while not episode.is_done:
            (reply,) = await sampler.generate([episode.request()])
            await episode.advance(reply)
        await episode.close()
        return episode.finish()

    return asyncio.run(play()), sampler


def sampled(trajectory: Trajectory) -> list[int]:
    """The ids under mask 1, in order."""
    return trajectory.token_ids[trajectory.loss_mask == 1].tolist()


# ---- the streams -------------------------------------------------------------------------------------------------


def test_worked_example_of_a_masked_trajectory(policy: Policy) -> None:
    """Literally the example of polyturn.types: one picture of 3 pads, replies of 4 and 3 tokens."""
    processor = copy.copy(policy.processor)
    processor.chat_template = templates.SHORT  # type: ignore[attr-defined]
    renderer = Renderer(replace(policy, processor=processor))
    (a,), (o,), (n,) = renderer.encode("a"), renderer.encode("o"), renderer.encode("\n")
    p, v = renderer.encode("<|im_start|><|vision_start|>")
    i, e = renderer.family.image_token_id, renderer.family.end_of_turn_id
    problem = Problem("p", "train", (Message("user", (tiny.picture(),)),), "12")
    replies = [
        Scripted((a, a, a, e), "stop", (-1.0, -2.0, -3.0, -4.0)),
        Scripted((a, a, e), "stop", (-5.0, -6.0, -7.0)),
    ]
    trajectory, sampler = run(
        renderer, Scenes(Message("user", ("o",)), None), tiny.saying(*replies), problem=problem
    )
    assert trajectory.token_ids.tolist() == [p, v, i, i, i, p, a, a, a, e, n, p, o, p, a, a, e]
    assert trajectory.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert trajectory.logprobs.tolist() == [0.0] * 6 + [-1, -2, -3, -4] + [0.0] * 4 + [-5, -6, -7]
    assert [request.engine_ids for (request,) in sampler.requests] == [
        (p, v, i, p),
        (p, v, i, p, a, a, a, e, n, p, o, p),
    ]


def test_sampled_ids_stay_verbatim_where_the_tokenizer_would_merge(renderer: Renderer) -> None:
    """Ids that are not the canonical ones of their text are neither merged nor split (TOK-01, sglang #26555)."""
    text = "Answer"
    pieces = tuple(token for letter in text for token in renderer.encode(letter))
    assert len(renderer.encode(text)) < len(pieces)
    first = Scripted((*pieces, renderer.family.end_of_turn_id))
    trajectory, sampler = run(renderer, Scenes("ok", None), tiny.saying(first, "done"))
    assert sampled(trajectory)[: len(pieces)] == list(pieces)
    assert trajectory.turns[0].reply_ids == first.token_ids
    assert trajectory.turns[0].reply_text == text
    (before,), (after,) = sampler.requests
    assert after.engine_ids[: len(before.engine_ids) + len(pieces)] == before.engine_ids + pieces


@pytest.mark.parametrize("error", [-1, 1])
def test_an_engine_with_another_prompt_length_fails_the_trajectory(
    renderer: Renderer, error: int
) -> None:
    (prompt,) = [len(renderer.prompt(PROBLEM.messages).token_ids)]
    script = tiny.saying(Scripted(renderer.encode_reply("a")[0], prompt_length_error=error))
    trajectory, _ = run(renderer, Scenes(None), script)
    assert trajectory.stop_reason is StopReason.TOKEN_MISMATCH
    assert trajectory.error == (
        f"problem p sibling 0 turn 0: the engine's prompt has {prompt + error} tokens, ours {prompt}"
    )
    assert trajectory.num_sampled == 0


def test_every_request_carries_all_pictures_so_far(renderer: Renderer) -> None:
    """A picture in the first message only, then one that the environment adds (TOK-04, slime #1847)."""
    crop = tiny.picture(32, 32, 9)
    env = Scenes("no picture", Observation("crop", (crop,)), None)
    trajectory, sampler = run(renderer, env, tiny.saying("a", "b", "c"))
    first = PROBLEM.images[0]
    asked = [request for (request,) in sampler.requests]
    assert [request.images for request in asked] == [(first,), (first,), (first, crop)]
    pad = renderer.family.image_token_id
    assert [request.engine_ids.count(pad) for request in asked] == [1, 1, 2]
    assert trajectory.images == (first, crop)
    assert int((trajectory.token_ids == pad).sum()) == 3 + 4


def test_newline_after_the_end_token_is_there_and_not_trained(renderer: Renderer) -> None:
    trajectory, _ = run(renderer, Scenes("ok", None), tiny.saying("a", "b"))
    ids = trajectory.token_ids.tolist()
    start = len(renderer.prompt(PROBLEM.messages).token_ids)
    end = ids.index(renderer.family.end_of_turn_id, start)
    assert (ids[end + 1],) == renderer.encode("\n")
    assert trajectory.loss_mask[end] == 1
    assert trajectory.loss_mask[end + 1] == 0


@pytest.mark.parametrize("tools", [False, True])
def test_trajectory_of_canonical_replies_equals_the_whole_conversation(
    renderer: Renderer, tools: bool
) -> None:
    system = Message("system", ("Be brief.",))
    problem = replace(PROBLEM, messages=(system, *PROBLEM.messages))
    env = Scenes(Observation("Not seen: none", (tiny.picture(32, 32, 9),)), None)
    env.tools = TOOLS  # type: ignore[attr-defined]
    trajectory, _ = run(renderer, env, tiny.saying("I look.", "12"), tools=tools, problem=problem)
    shown = trajectory.turns[0].observation
    assert shown is not None
    messages = [*problem.messages, Message("assistant", ("I look.",)), shown]
    whole = renderer.conversation(
        [*messages, Message("assistant", ("12",))], TOOLS if tools else ()
    )
    assert tuple(trajectory.token_ids.tolist()) + renderer.encode("\n") == whole.token_ids
    assert trajectory.images == whole.images


def test_an_end_token_that_the_engine_left_out_is_added_untrained(renderer: Renderer) -> None:
    """Sampled end tokens are trained, added ones are not, and a cut reply gets none (TOK-22, torchtune #2967)."""
    end = renderer.family.end_of_turn_id
    ids = renderer.encode("stopped by a string")
    trajectory, sampler = run(
        renderer, Scenes("ok", None), tiny.saying(Scripted(ids), Scripted(ids, "length"))
    )
    start = len(renderer.prompt(PROBLEM.messages).token_ids)
    assert trajectory.token_ids[start + len(ids)] == end
    assert trajectory.loss_mask[start + len(ids)] == 0
    assert trajectory.logprobs[start + len(ids)] == 0.0
    assert trajectory.token_ids[-1] == ids[-1]
    assert sampled(trajectory) == [*ids, *ids]
    _, (second,) = sampler.requests
    assert second.engine_ids[len(sampler.requests[0][0].engine_ids) + len(ids)] == end


PICTURES = [tiny.picture(), tiny.picture(16, 16, 3), tiny.picture(64, 32, 5)]
OBSERVATIONS = st.tuples(
    st.sampled_from(["", "ok", "Not seen: none"]), st.lists(st.sampled_from(PICTURES), max_size=2)
)
REPLIES = st.tuples(
    st.lists(st.integers(0, 300), max_size=6), st.sampled_from(["ended", "stop string", "cut"])
)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(REPLIES, OBSERVATIONS), min_size=1, max_size=4),
    first=st.lists(st.sampled_from(PICTURES), max_size=2),
    max_context=st.integers(20, 200),
)
def test_every_sampled_token_is_trained_once_and_nothing_else(
    policy: Policy,
    turns: list[tuple[tuple[list[int], str], tuple[str, list[ImageRecord]]]],
    first: list[ImageRecord],
    max_context: int,
) -> None:
    renderer = Renderer(policy)
    end = renderer.family.end_of_turn_id
    replies = [
        Scripted(
            (*ids, end) if ending == "ended" else tuple(ids),
            "length" if ending == "cut" else "stop",
        )
        for (ids, ending), _ in turns
    ]
    env = Scenes(*[Observation(text, tuple(images)) for _, (text, images) in turns[:-1]], None)
    problem = Problem("p", "train", (Message("user", (*first, "Find x.")),), "12")
    limits = replace_limits(max_context_tokens=max_context, max_turns=3)
    trajectory, sampler = run(renderer, env, tiny.saying(*replies), limits=limits, problem=problem)
    taken = sampler.replies
    assert len(taken) == len(trajectory.turns)
    assert sampled(trajectory) == [token for reply in taken for token in reply.token_ids]
    assert [turn.reply_ids for turn in trajectory.turns] == [reply.token_ids for reply in taken]
    expected = np.array([p for turn in trajectory.turns for p in turn.reply_logprobs], np.float32)
    assert trajectory.logprobs[trajectory.loss_mask == 1].tolist() == expected.tolist()
    assert not trajectory.logprobs[trajectory.loss_mask == 0].any()
    lengths = {len(trajectory.token_ids), len(trajectory.loss_mask), len(trajectory.logprobs)}
    assert len(lengths) == 1
    pads = int((trajectory.token_ids == renderer.family.image_token_id).sum())
    assert pads == sum(rows * columns for rows, columns in map(renderer.grid, trajectory.images))
    for (request,) in sampler.requests:
        assert request.engine_ids.count(renderer.family.image_token_id) == len(request.images)
        assert request.max_new_tokens >= 1
    counts = trajectory.tokens
    assert (counts.image_pads, counts.assistant) == (pads, trajectory.num_sampled)
    total = counts.prompt + counts.assistant + counts.observation + counts.image_pads
    assert total == len(trajectory.token_ids) <= max(max_context, counts.prompt + pads)


def replace_limits(**changes: object) -> RolloutParams:
    """LIMITS with other values."""
    return LIMITS.model_copy(update=changes)


# ---- why a trajectory ends ---------------------------------------------------------------------------------------


def test_environment_that_is_done_completes_it(renderer: Renderer) -> None:
    trajectory, _ = run(renderer, Scenes("ok", None), tiny.saying("a", "b"))
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.ENV_DONE, Status.COMPLETED)
    assert [turn.info for turn in trajectory.turns] == [{"heard": 1}, {"heard": 2}]
    assert trajectory.turns[1].observation is None


def test_last_turn_is_stepped_and_its_observation_neither_kept_nor_rendered(
    renderer: Renderer,
) -> None:
    env = Scenes("one", "two", "three")
    trajectory, _ = run(renderer, env, tiny.saying("a", "b"), limits=replace_limits(max_turns=2))
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.MAX_TURNS, Status.COMPLETED)
    assert env.heard == ["a", "b"]
    assert [turn.observation is None for turn in trajectory.turns] == [False, True]
    assert trajectory.token_ids[-1] == renderer.family.end_of_turn_id
    assert "two" not in renderer.decode(trajectory.token_ids.tolist())
    unrenderable = Scenes("one", Message("tool", (tiny.picture(3200, 10),)))
    trajectory, _ = run(
        renderer, unrenderable, tiny.saying("a", "b"), limits=replace_limits(max_turns=2)
    )
    assert trajectory.stop_reason is StopReason.MAX_TURNS


def test_reply_cut_at_its_length_truncates_and_is_not_stepped(renderer: Renderer) -> None:
    """The second reply ends with finish_reason length (TOK-20, OpenRLHF #1327)."""
    env = Scenes("one", None)
    script = tiny.saying("a", Scripted(renderer.encode("b b b"), "length"))
    trajectory, _ = run(renderer, env, script)
    assert trajectory.stop_reason is StopReason.MAX_NEW_TOKENS
    assert trajectory.status is Status.TRUNCATED
    assert env.heard == ["a"]
    assert trajectory.turns[1].reply_text == "b b b"


def test_a_whole_reply_that_the_engine_calls_cut_is_stepped(renderer: Renderer) -> None:
    """The end token is the last that the limit allows: SGLang says length (sgl-project/sglang#17487, #33758)."""
    env = Scenes("one", None)
    whole = renderer.encode_reply("a b")[0]
    limits = replace_limits(max_turn_tokens=len(whole))
    script = tiny.saying(Scripted(whole, "length"), "b")
    trajectory, _ = run(renderer, env, script, limits=limits)
    assert env.heard == ["a b", "b"]
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert sampled(trajectory) == [*whole, *renderer.encode_reply("b")[0]]


def test_budget_of_sampled_tokens_is_over_all_turns(renderer: Renderer) -> None:
    reply = renderer.encode_reply("a b c")[0]
    limits = replace_limits(max_new_tokens=len(reply) + 2, max_turn_tokens=len(reply) + 1)
    end = renderer.family.end_of_turn_id
    script = tiny.saying(Scripted(reply), Scripted((5, end)))
    trajectory, sampler = run(renderer, Scenes("one", "two", "three"), script, limits=limits)
    asked = [request.max_new_tokens for (request,) in sampler.requests]
    assert asked == [len(reply) + 1, 2]
    assert trajectory.stop_reason is StopReason.MAX_NEW_TOKENS
    assert trajectory.num_sampled == len(reply) + 2


def test_observation_that_leaves_no_room_for_a_reply_ends_it(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(PROBLEM.messages).token_ids)
    reply = len(renderer.encode_reply("a")[0])
    shown = len(renderer.observation(Message("tool", ("ok",))).token_ids)
    room = prompt + reply + shown
    limits = replace_limits(max_context_tokens=room)
    trajectory, _ = run(renderer, Scenes("ok", None), tiny.saying("a", "b"), limits=limits)
    assert trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert len(trajectory.token_ids) == prompt + reply
    limits = replace_limits(max_context_tokens=room + 1)
    script = tiny.saying("a", Scripted((5,), "length"))
    trajectory, sampler = run(renderer, Scenes("ok", None), script, limits=limits)
    assert sampler.requests[1][0].max_new_tokens == 1
    assert trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert len(trajectory.token_ids) == room + 1


def test_prompt_that_fills_the_context_is_never_sampled(renderer: Renderer) -> None:
    trajectory, sampler = run(
        renderer, Scenes(None), tiny.saying(), limits=replace_limits(max_context_tokens=4)
    )
    assert trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert sampler.requests == []
    assert trajectory.turns == ()


@pytest.mark.parametrize(
    ("finish", "reason", "status"),
    [
        ("abort", StopReason.ABORT, Status.ABORTED),
        ("error", StopReason.SAMPLER_ERROR, Status.FAILED),
    ],
)
def test_aborted_and_failed_replies_leave_the_stream_as_it_was(
    renderer: Renderer, finish: FinishReason, reason: StopReason, status: Status
) -> None:
    said = Scripted((1, 2), finish, error="engine gone")
    trajectory, _ = run(renderer, Scenes("ok", None), tiny.saying("a", said))
    assert (trajectory.stop_reason, trajectory.status) == (reason, status)
    assert trajectory.error == "engine gone"
    assert len(trajectory.turns) == 1
    assert trajectory.num_sampled == 2


# ---- environments ------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Callable[[str], object]:
    def step(_: str) -> object:
        raise error

    return step


class SpeechlessError(Exception):
    """Cannot say what is wrong."""

    def __str__(self) -> str:
        raise LookupError


class Step:
    """An environment of one method."""

    def __init__(self, step: Callable[[str], object]) -> None:
        self.step = step


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (failing(RuntimeError("broken")), "RuntimeError: broken"),
        (failing(StopIteration("no more boards")), "no more boards"),
        (failing(SpeechlessError()), "^SpeechlessError$"),
        # named, as half a surrogate pair in a test's name ends pytest-xdist
        pytest.param(failing(ValueError("\ud83d")), "ValueError: \ud83d", id="surrogate"),
        (lambda _: "ok", r"step\(\) must return \(observation, done, info\), got str"),
        (lambda _: ("ok", False), "got tuple of 2"),
        (lambda _: ("ok", 0.5, False, False, {}), "got tuple of 5"),  # gymnasium's
        (lambda _: (3, False, {}), "observation must be text, a Message or a mapping, got int"),
        (lambda _: (Message("tool", (tiny.picture(3200, 10),)), False, {}), "aspect ratio must be"),
        (
            lambda _: ("ok", False, {"x": object()}),
            r"info of step\(\) must be JSON: Object of type",
        ),
        (
            lambda _: ("ok", False, {"x": float("nan")}),
            r"info of step\(\) must be JSON: Out of range",
        ),
        (lambda _: ("ok", False, ["x"]), r"info of step\(\) must be a mapping, got list"),
    ],
)
def test_what_goes_wrong_in_an_environment_is_a_status(
    renderer: Renderer, step: Callable[[str], object], message: str
) -> None:
    trajectory, _ = run(renderer, Step(step), tiny.saying("a", "b"), timeout_s=5)
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.ENV_ERROR, Status.FAILED)
    assert trajectory.error is not None
    assert re.search(message, trajectory.error)
    assert [turn.reply_text for turn in trajectory.turns] == ["a"]
    assert trajectory.num_sampled == 2


def test_infos_of_turns_are_what_they_were_at_their_turn(renderer: Renderer) -> None:
    told: dict[str, int] = {"calls": 0}

    def step(_: str) -> object:
        told["calls"] += 1
        return "ok", told["calls"] == 2, told

    trajectory, _ = run(renderer, Step(step), tiny.saying("a", "b"))
    assert [dict(turn.info) for turn in trajectory.turns] == [{"calls": 1}, {"calls": 2}]


def test_environment_that_cannot_be_built_is_a_status(renderer: Renderer) -> None:
    shared = EpisodeSettings(renderer, lambda nonsense: nonsense, EnvParams(), LIMITS, 7, 1.0)

    async def play() -> Trajectory:
        episode = Episode(shared, PROBLEM, 0, 0)
        await episode.start()
        await episode.close()
        return episode.finish()

    trajectory = asyncio.run(play())
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "arguments ['nonsense']" in (trajectory.error or "")


def test_slow_environment_times_out_without_holding_up_the_end(renderer: Renderer) -> None:
    release = threading.Event()
    started = time.monotonic()
    trajectory, _ = run(renderer, Step(lambda _: release.wait(8)), tiny.saying("a"), timeout_s=0.1)
    waited = time.monotonic() - started
    release.set()
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.ENV_TIMEOUT, Status.FAILED)
    assert trajectory.error == "TimeoutError: no answer within env.step_timeout_s 0.1"
    assert waited < 4


def test_close_that_cannot_even_be_looked_up_is_counted(renderer: Renderer) -> None:
    class Env(Step):
        @property
        def close(self) -> object:
            raise RuntimeError("gone")

    trajectory, _ = run(renderer, Env(lambda _: ("", True, {})), tiny.saying("a"))
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert trajectory.env_failures.num_close_failures == 1


def test_slow_async_environment_times_out(renderer: Renderer) -> None:
    async def step(_: str) -> object:
        await asyncio.sleep(8)
        return None

    trajectory, _ = run(renderer, Step(step), tiny.saying("a"), timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.ENV_TIMEOUT


def test_time_limit_does_not_count_waiting_for_other_environments(renderer: Renderer) -> None:
    """Forty environments of 0.1 s, stepped together under a limit of 0.5 s each."""

    def step(_: str) -> object:
        time.sleep(0.1)
        return None, True, {}

    settings = EpisodeSettings(
        renderer, lambda: Step(step), EnvParams(tools_in_prompt=False, step_timeout_s=0.5), LIMITS, 7, 1.0
    )  # fmt: skip
    sampler = ScriptedSampler(renderer, tiny.saying("a"))

    async def play() -> list[StopReason | None]:
        episodes = [Episode(settings, PROBLEM, 0, sibling) for sibling in range(40)]
        for episode in episodes:
            await episode.start()
        replies = await sampler.generate([episode.request() for episode in episodes])
        await asyncio.gather(*(e.advance(r) for e, r in zip(episodes, replies, strict=True)))
        return [episode.stop_reason for episode in episodes]

    assert set(asyncio.run(play())) == {StopReason.ENV_DONE}


def test_synchronous_environments_run_off_the_event_loop(renderer: Renderer) -> None:
    threads: list[int] = []

    class Recording(Scenes):
        def __init__(self) -> None:
            super().__init__()
            threads.append(threading.get_ident())

        def reset(self) -> None:
            threads.append(threading.get_ident())

        def step(self, response_text: str) -> tuple[object, bool, dict[str, object]]:
            threads.append(threading.get_ident())
            return super().step(response_text)

        def close(self) -> None:
            threads.append(threading.get_ident())

    run(renderer, Recording, tiny.saying("a"))
    assert len(threads) == 4
    assert threading.get_ident() not in threads


def asynchronous(function: Callable[[str], object]) -> Callable[[str], Awaitable[object]]:
    async def step(text: str) -> object:
        return function(text)

    return step


def plain(text: str) -> object:
    """A plain function that returns an awaitable."""
    return asynchronous(lambda _: (None, True, {}))(text)


class BoundToItsThread(Scenes):
    """Holds what only the thread that opened it may use, as browsers, databases and renderers do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("one", None)
        self.database = sqlite3.connect(":memory:")
        self.closed = False

    def reset(self) -> str:
        self.database.execute("create table heard (text)")
        return ""

    def step(self, response_text: str) -> tuple[object, bool, dict[str, object]]:
        self.database.execute("insert into heard values (?)", [response_text])
        return super().step(response_text)

    def format_observation(self, observation: object) -> str:
        (count,) = self.database.execute("select count(*) from heard").fetchone()
        return f"{observation} {count}"

    def close(self) -> None:
        self.database.close()
        self.closed = True


def test_all_methods_of_an_environment_run_in_the_thread_that_built_it(renderer: Renderer) -> None:
    """huggingface/OpenEnv#516, The-AI-Alliance/cube-harness#489: greenlet.error, cannot switch to a different thread."""
    built: list[BoundToItsThread] = []

    def build(problem: Problem) -> BoundToItsThread:
        built.append(BoundToItsThread(problem))
        return built[0]

    trajectory, _ = run(renderer, build, tiny.saying("a", "b"))
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error
    assert trajectory.turns[0].observation == Message("tool", ("one 1",))
    assert trajectory.env_failures.num_close_failures == 0
    assert built[0].closed


def test_no_thread_of_an_environment_outlives_its_trajectory(renderer: Renderer) -> None:
    before = threading.active_count()
    release = threading.Event()
    run(renderer, Scenes("one", None), tiny.saying("a", "b"))
    run(renderer, Step(lambda _: release.wait(8)), tiny.saying("a"), timeout_s=0.1)
    release.set()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_environments_may_be_built_and_formatted_by_coroutines(renderer: Renderer) -> None:
    class Env(Scenes):
        async def format_observation(self, observation: object) -> Message:
            await asyncio.sleep(0)
            return Message("user", (f"{observation}!",))

    async def build(problem: Problem) -> Env:
        await asyncio.sleep(0)
        return Env("one", None)

    trajectory, _ = run(renderer, build, tiny.saying("a", "b"))
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error
    assert trajectory.turns[0].observation == Message("user", ("one!",))


@pytest.mark.parametrize(
    "step",
    [
        asynchronous(lambda _: (None, True, {})),
        functools.partial(asynchronous(lambda _: (None, True, {}))),
        plain,
    ],
)
def test_asynchronous_environments_are_awaited(
    renderer: Renderer, step: Callable[[str], object]
) -> None:
    trajectory, _ = run(renderer, Step(step), tiny.saying("a"))
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error


def test_first_observation_joins_the_prompt_and_reset_gets_a_seed(renderer: Renderer) -> None:
    seeds: list[int] = []

    class Board(Scenes):
        def reset(self, seed: int) -> tuple[Observation, dict[str, object]]:
            seeds.append(seed)
            return Observation("the board", (tiny.picture(16, 16),), role="user"), {}

    trajectory, sampler = run(renderer, Board(None), tiny.saying("a"))
    again, _ = run(renderer, Board(None), tiny.saying("a"))
    assert seeds[0] == seeds[1]
    board = Message("user", (tiny.picture(16, 16), "the board"))
    expected = renderer.prompt([*PROBLEM.messages, board])
    assert sampler.requests[0][0].engine_ids == expected.engine_ids
    assert trajectory.images == expected.images == again.images


def test_slow_build_times_out(renderer: Renderer) -> None:
    def build() -> object:
        time.sleep(1)
        return Scenes(None)

    trajectory, _ = run(renderer, build, tiny.saying(), timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.ENV_TIMEOUT


@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_that_is_built_too_late_is_closed(
    renderer: Renderer, *, is_async: bool
) -> None:
    """A sandbox that came after its time was nobody's (PrimeIntellect-ai/verifiers#983, #1381)."""
    release, closed = threading.Event(), threading.Event()

    class Env(Scenes):
        async def close_later(self) -> None:
            closed.set()

        def close(self) -> object:
            return self.close_later() if is_async else closed.set()

    def build() -> object:
        release.wait(8)
        return Env(None)

    trajectory, _ = run(renderer, build, tiny.saying(), timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.ENV_TIMEOUT
    assert not closed.is_set()
    release.set()
    assert closed.wait(5)


def test_slow_reset_times_out(renderer: Renderer) -> None:
    env = Scenes(None)
    env.reset = lambda: time.sleep(1)  # type: ignore[attr-defined]
    trajectory, sampler = run(renderer, env, tiny.saying(), timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.ENV_TIMEOUT
    assert sampler.requests == []


@pytest.mark.parametrize("empty", [None, "", {}, ("", {}), (None, {}), ({}, {})])
def test_empty_first_observation_adds_nothing(renderer: Renderer, empty: object) -> None:
    env = Scenes(None)
    env.reset = lambda: empty  # type: ignore[attr-defined]
    _, sampler = run(renderer, env, tiny.saying("a"))
    assert sampler.requests[0][0].engine_ids == renderer.prompt(PROBLEM.messages).engine_ids


def test_a_first_observation_of_any_type_goes_to_the_format_of_its_environment(
    renderer: Renderer,
) -> None:
    """Gymnasium's are arrays, whose comparison with "" has no truth value."""

    class Gym(Scenes):
        def reset(self) -> tuple[object, dict[str, object]]:
            return np.zeros((16, 16, 3), np.uint8), {}

        def format_observation(self, observation: object) -> object:
            return {"role": "user", "content": "the board", "image": observation}

    trajectory, sampler = run(renderer, Gym(None), tiny.saying("a"))
    assert trajectory.stop_reason is StopReason.ENV_DONE, trajectory.error
    assert [(i.width, i.height) for i in sampler.requests[0][0].images][-1] == (16, 16)


def test_failing_close_is_only_a_warning(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    env = Scenes(None)
    env.close = lambda: (_ for _ in ()).throw(RuntimeError("cannot close"))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        trajectory, _ = run(renderer, env, tiny.saying("a"))
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert "cannot close" in caplog.text


def test_siblings_and_new_attempts_are_given_the_same_task(renderer: Renderer) -> None:
    """An environment may draw its task from the seed: a group has one (mll-lab-nu/RAGEN#85, huggingface/trl#6420)."""
    seeds: dict[str, list[int]] = {"build": [], "reset": []}

    class Env(Scenes):
        def reset(self, seed: int) -> str:
            seeds["reset"].append(seed)
            return ""

    def build(seed: int) -> Env:
        seeds["build"].append(seed)
        return Env(None)

    shared = EpisodeSettings(renderer, build, EnvParams(tools_in_prompt=False), LIMITS, 7, 1.0)
    siblings = [Episode(shared, PROBLEM, 0, sibling) for sibling in range(2)]
    other = Episode(shared, replace(PROBLEM, id="other"), 1, 0)
    drawn_again = Episode(shared, PROBLEM, 2, 0, occurrence=1)

    async def play() -> None:
        for episode in (*siblings, siblings[1].again(), other, drawn_again):
            await episode.start()
            await episode.close()

    asyncio.run(play())
    assert seeds["build"] == seeds["reset"]
    assert [seed == seeds["reset"][0] for seed in seeds["reset"]] == [True] * 3 + [False] * 2
    assert len({episode.request().seed for episode in siblings}) == 2


def test_seeds_differ_by_turn_and_sibling_only(renderer: Renderer) -> None:
    _, first = run(renderer, Scenes("ok", None), tiny.saying("a", "b"))
    _, again = run(renderer, Scenes("ok", None), tiny.saying("a", "b"))
    seeds = [request.seed for (request,) in first.requests]
    assert len(set(seeds)) == 2
    assert seeds == [request.seed for (request,) in again.requests]
