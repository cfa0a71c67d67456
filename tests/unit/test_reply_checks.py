"""Replies that must not be trained on: told by a status with all numbers, before they enter the stream."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from polyturn.render import Renderer
from polyturn.reply_checks import Expected, objection
from polyturn.sampler.base import Reply
from polyturn.types import Status, StopReason
from tests.unit import tiny
from tests.unit.test_episode import PROBLEM, Scenes, run
from tests.unit.tiny import Scripted

GOOD = Reply((5, 6, 7, 8, 9), (-1.0, -0.5, 0.0, -2.0, -3.0), "stop", 20, 4)
EXPECTED = Expected(prompt_length=20, max_new_tokens=5, policy_version=4)


def test_a_good_reply_is_taken(renderer: Renderer) -> None:
    assert objection(GOOD, EXPECTED, renderer) is None
    assert objection(GOOD, replace(EXPECTED, policy_version=None), renderer) is None
    empty = replace(GOOD, token_ids=(), logprobs=())
    assert objection(empty, EXPECTED, renderer) is None


@pytest.mark.parametrize("number", [0, 1, 4, 6, 7])
def test_another_number_of_logprobs_is_told_with_all_lengths(
    renderer: Renderer, number: int
) -> None:
    """TOK-18: seven logprobs for a response of five (slime #1862)."""
    found = objection(replace(GOOD, logprobs=(-1.0,) * number), EXPECTED, renderer)
    assert found is not None
    assert found.reason is StopReason.TOKEN_MISMATCH
    assert found.message == (
        f"the reply has 5 token ids, but {number} logprobs (prompt 20, total 25 tokens)"
    )


def test_image_special_tokens_and_unknown_ids_are_no_reply(renderer: Renderer) -> None:
    for token in (*renderer.family.banned_ids, -1, renderer.vocab_size, 10**6):
        found = objection(replace(GOOD, token_ids=(5, token, 7, 8, 9)), EXPECTED, renderer)
        assert found is not None
        assert found.reason is StopReason.TOKEN_MISMATCH
        assert f"[{token}]" in found.message


def test_a_reply_that_goes_on_after_its_end_is_none(renderer: Renderer) -> None:
    """Speculative decoding left what it had drafted behind the end token (sgl-project/sglang#30291, #31569, #33758)."""
    for end in renderer.family.end_ids:
        found = objection(replace(GOOD, token_ids=(5, 6, end, 8, 9)), EXPECTED, renderer)
        assert found is not None
        assert found.reason is StopReason.TOKEN_MISMATCH
        assert found.message == "the reply goes on after the end token at 2 of 5"
        whole = replace(GOOD, token_ids=(5, 6, 7, 8, end))
        assert objection(whole, EXPECTED, renderer) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_no_numbers_are_the_engines_fault(
    renderer: Renderer, value: float
) -> None:
    found = objection(replace(GOOD, logprobs=(-1.0, value, -1.0, -1.0, -1.0)), EXPECTED, renderer)
    assert found is not None
    assert found.reason is StopReason.SAMPLER_ERROR
    assert "not finite" in found.message


def test_more_tokens_than_asked_for_and_other_weights_are_the_engines_fault(
    renderer: Renderer,
) -> None:
    longer = objection(GOOD, replace(EXPECTED, max_new_tokens=4), renderer)
    assert longer is not None
    assert longer.message == "the reply has 5 tokens, 4 were asked for"
    other = objection(GOOD, replace(EXPECTED, policy_version=3), renderer)
    assert other is not None
    assert other.message == "the reply is of policy version 4, the trajectory's is 3"
    assert {longer.reason, other.reason} == {StopReason.SAMPLER_ERROR}


@pytest.mark.parametrize("turn", [0, 1])
def test_a_reply_that_is_not_taken_leaves_the_stream_as_it_was(
    renderer: Renderer, turn: int
) -> None:
    """An image pad from a server that does not ban it: a status, and nothing that the learner could trip over."""
    pad = renderer.family.image_token_id
    bad = Scripted((5, pad, renderer.family.end_of_turn_id))
    trajectory, _ = run(renderer, Scenes("ok", "ok"), tiny.saying(*["a"] * turn, bad))
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.TOKEN_MISMATCH, Status.FAILED)
    assert trajectory.error == (
        f"problem p sibling 0 turn {turn}: the reply has image special tokens [{pad}], which are banned "
        "from sampling"
    )
    assert len(trajectory.turns) == turn
    features = sum(rows * columns for rows, columns in map(renderer.grid, trajectory.images))
    assert int((trajectory.token_ids == pad).sum()) == features


def test_lengths_that_differ_name_the_trajectory(renderer: Renderer) -> None:
    said = Scripted((1, 2, 3, 4, 5), logprobs=(-1.0,) * 7)
    trajectory, _ = run(renderer, Scenes(None), tiny.saying(said))
    prompt = len(renderer.prompt(PROBLEM.messages).token_ids)
    assert trajectory.stop_reason is StopReason.TOKEN_MISMATCH
    assert trajectory.error == (
        "problem p sibling 0 turn 0: the reply has 5 token ids, but 7 logprobs "
        f"(prompt {prompt}, total {prompt + 5} tokens)"
    )
