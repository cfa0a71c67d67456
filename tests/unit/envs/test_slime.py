"""Modules in slime's form run unchanged: the shipped example, pictures in observations, what sample and args hold."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from PIL import Image

from polyturn.envs.base import (
    Env,
    EnvContext,
    SlimeArgs,
    SlimeSample,
    build,
    image_record,
    load_object,
    observation_message,
)
from polyturn.params import EnvParams, RolloutParams
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.types import Json, Message, Problem, StopReason, Trajectory
from tests.unit import tiny

EXAMPLE = "plugins.slime_geo3k:build_env"
PROBLEM = tiny.problems(1)[0]


def call(answer: str) -> str:
    return f'<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


def make(max_turns: int = 3, metadata: Mapping[str, Json] | None = None, **params: object) -> Env:
    problem = Problem("p", "train", PROBLEM.messages, "3 \\sqrt { 2 }", metadata or {})
    return build(load_object(EXAMPLE, "env.build"), EnvContext(problem, params, max_turns))


def step(env: Env, reply: str) -> tuple[Message | None, bool, Mapping[str, object]]:
    observation, done, info = env.step(reply)  # type: ignore[misc]
    return (None if done else observation_message(env, observation)), done, info


def test_the_shipped_example_checks_answers_turn_by_turn() -> None:
    env = make()
    assert env.reset() == ({}, {"has_ground_truth": True})  # type: ignore[attr-defined]
    message, done, info = step(env, call("5"))
    assert (message, done, info["score"]) == (Message("tool", ("5 is wrong.",)), False, False)
    message, done, info = step(env, call("\\\\sqrt{18}"))
    assert message is not None
    assert message.text.startswith("\\sqrt{18} is right. Now give your final answer")
    assert step(env, "\\boxed{3\\sqrt{2}}")[1]
    assert "Call calc_score" in step(make(), "<tool_call>{</tool_call>")[0].text  # type: ignore[union-attr]


def test_env_params_and_the_rows_metadata_reach_it() -> None:
    assert step(make(feedback=False), call("5"))[0] == Message("tool", ("5 is noted.",))
    own = make(metadata={"metadata": {"ground_truth": "5"}})
    assert step(own, call("5"))[0] == Message("tool", ("5 is right.",))


def test_it_plays_through_the_rollout(renderer: Renderer) -> None:
    right = PROBLEM.answer
    said = [call("99999"), call(right), f"\\boxed{{{right}}}"]
    (trajectory,) = play(EXAMPLE, said, renderer)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENV_DONE, 1.0)
    texts = [turn.observation.text for turn in trajectory.turns if turn.observation]
    assert texts[0] == "99999 is wrong."
    assert texts[1].startswith(f"{right} is right. Now give")
    assert [turn.info.get("turn") for turn in trajectory.turns] == [1, 2, 3]


def play(path: str, said: list[str], renderer: Renderer) -> tuple[Trajectory, ...]:
    settings = RolloutSettings(
        EnvParams(build=path),
        RolloutParams(max_turns=3, max_turn_tokens=None, max_new_tokens=400),
        tiny.params().reward,
    )
    sampler = tiny.ScriptedSampler(renderer, tiny.saying(*said))
    groups = asyncio.run(rollout([PROBLEM], sampler, renderer, settings, Draw(1, 1, 1.0)))
    return groups[0].trajectories


class CroppingEnv:
    """Answers with a part of the problem's picture, as an env of slime's with multi_modal_data does."""

    def __init__(self, picture: Image.Image, form: str) -> None:
        self.picture = picture
        self.form = form

    def reset(self) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, object], bool, dict[str, object]]:
        crop = self.picture.crop((0, 0, 32, 32))
        buffer = io.BytesIO()
        crop.save(buffer, format="PNG")
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        shown = {"pil": crop, "bytes": buffer.getvalue(), "uri": uri}[self.form]
        text = {"obs_str": "the corner", "role": "tool", "multi_modal_data": {"image": [shown]}}
        return text, "boxed" in response_text, {}


def build_cropping(sample: SlimeSample, args: SlimeArgs) -> CroppingEnv:
    """slime keeps the prompt's pictures in sample.multimodal_inputs."""
    return CroppingEnv(sample.multimodal_inputs["images"][0], getattr(args, "form", "pil"))


@pytest.mark.parametrize("form", ["pil", "bytes", "uri"])
def test_pictures_in_an_observation_may_have_slimes_forms(form: str) -> None:
    env = build(build_cropping, EnvContext(PROBLEM, {"form": form}))
    message = step(env, "look")[0]
    assert message is not None
    with Image.open(io.BytesIO(PROBLEM.images[0].read())) as whole:
        assert message == Message("tool", (image_record(whole.crop((0, 0, 32, 32))), "the corner"))


def test_a_cropping_module_plays_through_the_rollout(renderer: Renderer) -> None:
    (trajectory,) = play(
        "tests.unit.envs.test_slime:build_cropping", ["look", "\\boxed{1}"], renderer
    )
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert len(trajectory.images) == 2


def test_what_args_lacks_is_named_with_its_key() -> None:
    args = SlimeArgs(EnvContext(PROBLEM, {"known": 1}, max_turns=4))
    assert (args.max_turns, args.known, getattr(args, "other", 7)) == (4, 1, 7)
    with pytest.raises(AttributeError, match=r"args has no other; set env\.params\.other"):
        _ = args.other


@pytest.mark.parametrize("bad", [b"no picture", "data:image/png;base64,AAAA", "file.png", None])
def test_what_is_no_picture_is_refused_with_a_reason(bad: object) -> None:
    with pytest.raises(ValueError, match="a picture must be"):
        image_record(bad)
    observation = {"obs_str": "", "multi_modal_data": {"image": [bad]}}
    with pytest.raises(ValueError, match="a picture must be"):
        observation_message(SimpleNamespace(), observation)  # type: ignore[arg-type]
