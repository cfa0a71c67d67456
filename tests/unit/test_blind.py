"""The gate against policies that do not see: it lets the tiny model pass, and stops each way of being blind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from PIL import Image

from polyturn import blind
from polyturn.blind import BlindModelError, BlindReport, change
from polyturn.envs.base import image_record
from polyturn.params import EnvParams, RolloutParams
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.rollout import RolloutSettings
from polyturn.sampler.base import Reply, Sampler, SampleRequest
from polyturn.sampler.hf import HfSampler
from polyturn.types import ImageRecord, Message, Problem
from tests.unit import tiny
from tests.unit.sampler.test_hf import steered
from tests.unit.tiny import Scripted, ScriptedSampler

PROBLEMS = tiny.problems(3)


def settings(**rollout: object) -> RolloutSettings:
    limits = {"max_turns": 3, "max_turn_tokens": 6, "blind_problems": 2, **rollout}
    return RolloutSettings(
        EnvParams(build="tests.unit.toy_envs:build_shower", tools_in_prompt=False),
        RolloutParams.model_validate(limits),
        tiny.params().reward,
    )


def probe(
    policy: Policy,
    using: RolloutSettings | None = None,
    sampler: Sampler | None = None,
    problems: tuple[Problem, ...] = PROBLEMS,
) -> BlindReport | None:
    renderer = Renderer(policy)
    return asyncio.run(
        blind.check(
            problems,
            sampler or HfSampler(policy, renderer),
            renderer,
            using or settings(),
            seed=3,
        )
    )


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_a_model_that_sees_passes_with_its_numbers(
    name: str, request: pytest.FixtureRequest
) -> None:
    policy: Policy = request.getfixturevalue(name)
    report = probe(steered(policy, policy.family.end_of_turn_id, 7.0))  # so that turns end
    assert report is not None
    assert report.problems == ("train-0", "train-1")
    assert report.mean_change > 1e-3
    assert report.pads == report.features
    assert len(report.pads) > 2
    assert report.pads[0] == 9
    assert max(report.pads) > 9, "later turns have more pictures"


def test_a_tower_of_zeros_is_blind(policy: Policy) -> None:
    """Vision weights that were not loaded: every picture has the same features."""
    own = tiny.copy_of(policy)
    with torch.no_grad():
        for parameter in own.model.model.visual.parameters():
            parameter.zero_()
    with pytest.raises(
        BlindModelError,
        match=r"does not look: its logprobs move by 0 nats on average .*blind_min_change is 0.0001 "
        r"\(train-0 0, train-1 0\)",
    ):
        probe(own)


class DropsPictures(HfSampler):
    """An engine that takes the first picture of the run for every one of that size."""

    first: ImageRecord | None = None

    async def generate(self, requests: list[SampleRequest]) -> list[Reply]:  # type: ignore[override]
        self.first = self.first or requests[0].images[0]
        shown = [
            replace(request, images=(self.first,) * len(request.images)) for request in requests
        ]
        return await super().generate(shown)


def test_an_engine_that_drops_the_pictures_is_blind(policy: Policy) -> None:
    """TOK-03: the picture never reaches the vision encoder (slime #1803)."""
    with pytest.raises(
        BlindModelError, match=r"do pictures reach the sampler\? \(rollout\.blind_problems: 0"
    ):
        probe(policy, sampler=DropsPictures(policy, Renderer(policy)))


def test_an_engine_without_an_answer_is_not_called_blind(policy: Policy) -> None:
    renderer = Renderer(policy)
    gone = ScriptedSampler(renderer, lambda *_: Scripted((), "error", error="http://a: HTTP 500"))
    with pytest.raises(BlindModelError, match="no reply: http://a: HTTP 500"):
        probe(policy, sampler=gone)


def test_the_threshold_is_a_param(policy: Policy) -> None:
    with pytest.raises(BlindModelError, match="blind_min_change is 1000"):
        probe(policy, settings(blind_min_change=1000.0))


def test_pads_without_their_features_are_told_with_the_counts(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blind, "_num_features", lambda *_: 8)
    with pytest.raises(BlindModelError, match=r"pads and features differ: \[9, .*\] pads, \[8, "):
        probe(policy)


def test_problems_without_pictures_and_a_count_of_0_are_not_probed(policy: Policy) -> None:
    text = Problem("t", "train", (Message("user", ("Find x.",)),), "12")
    assert probe(policy, problems=(text,)) is None
    assert probe(policy, settings(blind_problems=0)) is None
    report = probe(policy, problems=(text, *PROBLEMS))
    assert report is not None
    assert report.problems == ("train-0", "train-1")


def test_change_is_the_largest_up_to_the_first_other_token() -> None:
    def reply(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Reply:
        return Reply(ids, logprobs, "length", 4, 0)

    seen = reply((1, 2, 3), (-1.0, -0.5, -2.0))
    assert change(seen, seen) == 0.0
    assert change(seen, reply((1, 2, 3), (-1.0, -0.75, -2.0))) == 0.25
    assert change(seen, reply((1, 9, 3), (-1.0, -0.75, -9.0))) == 0.25
    assert change(seen, reply((), ())) == 0.0


def test_blank_is_white_and_as_large() -> None:
    white = blind.blank(tiny.picture(48, 16))
    assert (white.width, white.height) == (48, 16)
    assert white == image_record(Image.new("RGB", (48, 16), "white"))
