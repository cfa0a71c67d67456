"""Samples: what a trajectory or a demonstration trains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polyturn.envs.demonstration import Demonstration, Say
from polyturn.render import Renderer
from polyturn.samples import from_demonstration, from_trajectory, reply_mask, with_gradient
from polyturn.types import Group, Message, Problem, StopReason, TrainingSample, Trajectory
from tests.unit import tiny

PROBLEM = Problem("p", "train", (Message("user", ("Find x.",)),), "12")


def trajectory(mask: list[int], sibling: int = 0) -> Trajectory:
    return Trajectory(
        problem=PROBLEM,
        group_index=0,
        sibling=sibling,
        turns=(),
        token_ids=np.arange(len(mask)),
        loss_mask=np.array(mask, dtype=np.int8),
        logprobs=-np.array(mask, dtype=np.float32),
        images=(tiny.picture(),),
        stop_reason=StopReason.ENV_DONE,
        policy_version=0,
    )


def test_a_mask_with_a_gap_keeps_both_spans() -> None:
    """0*5, 1*3, 0*4, 1*2: five trained tokens of a response of nine (TOK-11, slime #1563)."""
    mask = [0] * 5 + [1] * 3 + [0] * 4 + [1] * 2
    sample = from_trajectory(trajectory(mask), 0.5)
    assert np.flatnonzero(sample.loss_mask).tolist() == [5, 6, 7, 12, 13]
    assert trajectory(mask).num_sampled == 5
    assert len(mask) - np.flatnonzero(sample.loss_mask)[0] == 9
    assert sample.advantage == 0.5
    assert sample.images == (tiny.picture(),)
    assert sample.id == "p/0/0"


def test_arrays_of_different_length_are_refused_with_id_and_every_length() -> None:
    """Seven logprobs for a response of five after a prompt of three (TOK-18, slime #1862)."""
    mask = np.array([0] * 3 + [1] * 5, np.int8)
    with pytest.raises(
        ValueError,
        match="sample p-7/0/2: arrays differ in length: token_ids 8, loss_mask 8, logprobs 7; prompt 3, "
        "response 5, total 8",
    ):
        TrainingSample(np.zeros(8, np.int64), mask, np.zeros(7, np.float32), (), id="p-7/0/2")
    for lengths in ((4, 5, 5), (5, 4, 5), (5, 5, 4), (0, 0, 1)):
        ids, bits, logprobs = (np.zeros(n) for n in lengths)
        with pytest.raises(ValueError, match=r"sample \(no id\)"):
            TrainingSample(
                ids.astype(np.int64), bits.astype(np.int8), logprobs.astype(np.float32), ()
            )


def test_only_trajectories_with_a_gradient_become_samples() -> None:
    group = Group(0, tuple(trajectory([0, 1], sibling) for sibling in range(4)))
    empty = replace(group.trajectories[3], loss_mask=np.zeros(2, np.int8))
    groups = [Group(0, (*group.trajectories[:3], empty)), Group(1, group.trajectories[:1])]
    samples = with_gradient(groups, [[1.0, 0.0, None, -1.0], [-0.5]])
    assert [sample.advantage for sample in samples] == [1.0, -0.5]
    samples = with_gradient(groups, [[1.0, 0.0, None, 0.0], [-0.5]], keeps_zeros=True)
    assert [sample.advantage for sample in samples] == [1.0, 0.0, -0.5]


def test_tokens_that_overlap_a_trained_span_are_trained() -> None:
    spans = [(0, 4), (4, 10), (10, 14), (14, 14)]
    assert reply_mask(Say("zoom northwest", ((5, 14),)), spans) == [0, 1, 1, 0]
    assert reply_mask(Say("zoom northwest", ((0, 1), (13, 14))), spans) == [1, 0, 1, 0]
    assert reply_mask(Say("zoom northwest"), spans) == [1, 1, 1, 1]
    assert reply_mask(Say("zoom northwest", ()), spans) == [0, 0, 0, 0]


@pytest.mark.parametrize("spans", [((3, 3),), ((5, 2),), ((0, 4), (2, 6)), ((0, 99),), ((-1, 2),)])
def test_spans_that_are_no_parts_of_the_reply_are_refused(
    spans: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ValueError, match="trained spans must be ordered"):
        Say("zoom northwest", spans)


def test_demonstration_renders_like_a_conversation_and_trains_its_replies(
    renderer: Renderer,
) -> None:
    crop = Message("tool", (tiny.picture(32, 32, 9), "Not seen: none"))
    say = "zoom northwest"
    demonstration = Demonstration(
        (Message("user", (tiny.picture(), "Find x.")),),
        (Say(say, ((5, 14),)), crop, Say("12")),
        "search",
    )
    sample = from_demonstration(demonstration, renderer)
    whole = renderer.conversation(
        [
            *demonstration.prompt,
            Message("assistant", (say,)),
            crop,
            Message("assistant", ("12",)),
        ]
    )
    assert tuple(sample.token_ids.tolist()) + renderer.encode("\n") == whole.token_ids
    assert sample.images == whole.images
    trained = sample.token_ids[sample.loss_mask == 1].tolist()
    assert renderer.decode(trained).strip() == "northwest12"
    assert trained[-1] == renderer.family.end_of_turn_id
    assert trained.count(renderer.family.end_of_turn_id) == 1
    assert (sample.kind, float(np.abs(sample.logprobs).sum())) == ("search", 0.0)


@pytest.mark.parametrize("turns", [(), (Say("a"), Say("b")), (Message("tool", ("a",)),)])
def test_turns_that_do_not_alternate_are_refused(turns: tuple[Say | Message, ...]) -> None:
    with pytest.raises(ValueError, match="must alternate Say, Message"):
        Demonstration((Message("user", ("Find x.",)),), turns, "read")


def test_tools_of_the_environment_stand_in_a_demonstrations_prompt(renderer: Renderer) -> None:
    demonstration = Demonstration((Message("user", ("q",)),), (Say("a"),), "easy")
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    without = from_demonstration(demonstration, renderer)
    shown = from_demonstration(demonstration, renderer, tools)
    prompt = renderer.prompt(demonstration.prompt, tools)
    assert tuple(shown.token_ids[: len(prompt.token_ids)]) == prompt.token_ids
    assert len(shown.token_ids) > len(without.token_ids)
    assert shown.loss_mask.sum() == without.loss_mask.sum()
