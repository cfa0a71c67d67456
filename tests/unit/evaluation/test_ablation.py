"""A policy that looks loses with blank pictures, one that does not look loses nothing."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

from PIL import Image

from polyturn.envs.base import Observation, observation_message
from polyturn.evaluation.ablation import Ablation, BlankedEnv, ablate, blanked
from polyturn.evaluation.evaluate import EvaluationPlan, evaluation_settings
from polyturn.params import EnvParams
from polyturn.render import Renderer
from polyturn.sampler.base import SampleRequest
from polyturn.types import ImageRecord, Message
from tests.unit import tiny
from tests.unit.tiny import Script, ScriptedSampler

PROBLEMS = tiny.problems(6, "test")
PLAN = EvaluationPlan(
    seed=3, samples_per_problem=1, temperature=1.0, batch_size=8, bootstrap_samples=200
)
LOOK = '<tool_call>{"name": "zoom", "arguments": {"region": "northwest"}}</tool_call>'


def colours(picture: ImageRecord) -> list[tuple[int, tuple[int, ...]]]:
    return Image.open(io.BytesIO(picture.read())).getcolors()  # type: ignore[return-value]


def run(renderer: Renderer, script: Script) -> tuple[Ablation, list[SampleRequest]]:
    """A policy that says what `script` says, in the zoom environment."""
    asked: list[SampleRequest] = []

    class Forgetful(ScriptedSampler):
        async def generate(self, requests):  # type: ignore[no-untyped-def]
            asked.extend(requests)
            for request in requests:
                self.turns[request.session] = len(request.images) - 1
            return await super().generate(requests)

    sampler = Forgetful(renderer, script)
    env = EnvParams(build="polyturn.envs.zoom:build_env", tools_in_prompt=False)
    settings = replace(evaluation_settings(tiny.params()), env=env)
    settings = replace(
        settings,
        rollout=settings.rollout.model_copy(update={"max_new_tokens": 512, "max_turn_tokens": 200}),
    )
    return asyncio.run(ablate(PROBLEMS, sampler, renderer, settings, PLAN)), asked


def answer_of(request: SampleRequest) -> str:
    return next(p.answer for p in PROBLEMS if p.images[0].sha256 == request.images[0].sha256)


def test_a_policy_that_reads_the_crop_loses_everything_without_it(renderer: Renderer) -> None:
    def script(request: SampleRequest, turn: int) -> str:
        if turn == 0:
            return LOOK
        sees = len(colours(request.images[1])) > 1
        return f"\\boxed{{{answer_of(request) if sees else 999}}}"

    found, asked = run(renderer, script)
    has_content = [len(colours(r.images[1])) > 1 for r in asked if len(r.images) == 2][:6]
    share = sum(has_content) / 6
    assert 0 < share <= 1  # figures reach into most corners
    assert (found.seen.mean, found.blank.mean) == (share, 0.0)
    assert found.difference.mean == share
    assert found.difference.low <= share <= found.difference.high
    assert found.num_problems == 6


def test_a_policy_that_does_not_look_loses_nothing(renderer: Renderer) -> None:
    found, asked = run(renderer, lambda request, _: f"\\boxed{{{answer_of(request)}}}")
    assert (found.seen.mean, found.blank.mean, found.difference.mean) == (1.0, 1.0, 0.0)
    half = len(asked) // 2
    assert [r.seed for r in asked[:half]] == [r.seed for r in asked[half:]]


def test_only_what_the_environment_shows_is_blank(renderer: Renderer) -> None:
    _, asked = run(renderer, lambda request, turn: LOOK if turn == 0 else "\\boxed{1}")
    second = [request for request in asked if len(request.images) == 2]
    for seen, blank in zip(second[:6], second[6:], strict=True):
        assert seen.images[0] == blank.images[0]
        assert (seen.images[1].width, seen.images[1].height) == (
            blank.images[1].width,
            blank.images[1].height,
        )
        assert colours(blank.images[1]) == [(64 * 64, (255, 255, 255))]


def test_words_stay_and_pictures_become_white() -> None:
    message = blanked(Message("tool", ("left", tiny.picture(), "right")))
    assert message.text == "leftright"
    assert colours(message.images[0]) == [(48 * 16, (255, 255, 255))]


class Coroutines:
    """An environment with asynchronous methods and a format of its own."""

    async def reset(self) -> tuple[str, dict[str, object]]:
        return "begin", {}

    async def step(self, response_text: str) -> tuple[object, bool, dict[str, object]]:
        return response_text, response_text == "end", {"heard": response_text}

    def format_observation(self, observation: object) -> Message:
        return Message("user", (tiny.picture(), str(observation)))


def test_asynchronous_environments_with_formats_of_their_own_are_blanked_too() -> None:
    env = BlankedEnv(Coroutines())

    async def play() -> tuple[object, object, object]:
        return await env.reset(1), await env.step("a"), await env.step("end")  # type: ignore[misc]

    first, (shown, is_done, info), last = asyncio.run(play())  # type: ignore[misc]
    assert observation_message(env, first).images == (tiny.picture(),)  # type: ignore[arg-type]
    assert (shown.text, is_done, info) == ("a", False, {"heard": "a"})
    assert colours(shown.images[0]) == [(48 * 16, (255, 255, 255))]
    assert last == ("end", True, {"heard": "end"})
    assert env.close() is None


def test_an_environment_without_reset_has_no_first_observation() -> None:
    class Plain:
        def step(self, response_text: str) -> object:
            return Observation("x"), False, {}

    assert BlankedEnv(Plain()).reset(0) is None
