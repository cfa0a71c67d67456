"""The canonical rendering as a check on what is trained: replies may be tokenised anyhow, the rest may not differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.comparator import ComparisonError, Prompt, compare
from polyturn.envs.base import Observation
from polyturn.envs.zoom import TOOLS
from polyturn.policy.model import Policy
from polyturn.render import Renderer, TemplateError
from polyturn.types import ImageRecord, Message, Problem, Trajectory
from tests.unit import templates, tiny
from tests.unit.test_episode import OBSERVATIONS, PICTURES, PROBLEM, REPLIES, Scenes, run
from tests.unit.tiny import Scripted

PROMPT = Prompt(PROBLEM.messages)
CROP = tiny.picture(32, 32, 9)


def played(renderer: Renderer, *replies: str | Scripted) -> Trajectory:
    """Three turns with a new picture and a text as observations."""
    env = Scenes(Observation("crop", (CROP,)), Message("user", ("Try again.",)), None)
    said = replies or ("I look.", "x + 3", "12")
    return run(renderer, env, tiny.saying(*said))[0]


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.tuples(REPLIES, OBSERVATIONS), min_size=1, max_size=4),
    first=st.lists(st.sampled_from(PICTURES), max_size=2),
    tools=st.booleans(),
)
def test_whatever_is_sampled_the_stream_is_the_conversation(
    policy: Policy,
    turns: list[tuple[tuple[list[int], str], tuple[str, list[ImageRecord]]]],
    first: list[ImageRecord],
    tools: bool,
) -> None:
    """Ids of any kind: broken characters, special tokens, ends that are sampled, added or missing."""
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
    env.tools = TOOLS  # type: ignore[attr-defined]
    problem = Problem("p", "train", (Message("user", (*first, "Find x.")),), "12")
    trajectory, _ = run(renderer, env, tiny.saying(*replies), problem=problem, tools=tools)
    assert compare(trajectory, Prompt(problem.messages, TOOLS if tools else ()), renderer) >= 0


def test_canonical_replies_stand_verbatim_in_the_whole_conversation(renderer: Renderer) -> None:
    assert compare(played(renderer), PROMPT, renderer) == 0


def test_pieces_that_the_tokenizer_would_merge_are_no_difference(renderer: Renderer) -> None:
    pieces = tuple(token for letter in "Answer" for token in renderer.encode(letter))
    odd = Scripted((*pieces, renderer.family.end_of_turn_id))
    trajectory = played(renderer, odd, odd, odd)
    assert compare(trajectory, PROMPT, renderer) == 0


def end_of_first_reply(trajectory: Trajectory) -> int:
    return int(np.flatnonzero(np.diff(trajectory.loss_mask) == -1)[0]) + 1


def without(trajectory: Trajectory, place: int) -> Trajectory:
    arrays = (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs)
    ids, mask, logprobs = (np.delete(array, place) for array in arrays)
    return replace(trajectory, token_ids=ids, loss_mask=mask, logprobs=logprobs)


def changed(trajectory: Trajectory, place: int, token: int) -> Trajectory:
    ids = trajectory.token_ids.copy()
    ids[place] = token
    return replace(trajectory, token_ids=ids)


@pytest.mark.parametrize(
    "damage",
    [
        without,  # the newline after the end token (verl #6501)
        lambda t, at: without(t, at - 1),  # the end token itself
        lambda t, at: without(t, int(np.flatnonzero(t.token_ids == 399)[0])),  # a pad
        lambda t, at: changed(t, at - 2, 5),  # a sampled id
        lambda t, at: changed(t, at + 3, 5),  # a token of the observation
        lambda t, at: changed(t, 0, 5),  # a token of the prompt
        lambda t, at: without(t, len(t.token_ids) - 1),
    ],
)
def test_any_other_stream_is_told_with_place_and_text(
    renderer: Renderer, damage: Callable[[Trajectory, int], Trajectory]
) -> None:
    assert renderer.family.image_token_id == 399
    trajectory = played(renderer)
    broken = damage(trajectory, end_of_first_reply(trajectory))
    with pytest.raises(
        ComparisonError, match=r"problem p group 0 sibling 0: token ids differ .* from \d+ of \d+"
    ):
        compare(broken, PROMPT, renderer)


def test_a_mask_that_trains_an_observation_is_told(renderer: Renderer) -> None:
    trajectory = played(renderer)
    place = end_of_first_reply(trajectory)
    mask = trajectory.loss_mask.copy()
    mask[place] = 1
    with pytest.raises(ComparisonError, match=f"the loss mask is wrong from token {place} on"):
        compare(replace(trajectory, loss_mask=mask), PROMPT, renderer)


def with_template(policy: Policy, template: str) -> Renderer:
    processor = copy.copy(policy.processor)
    processor.chat_template = template  # type: ignore[attr-defined]
    return Renderer(replace(policy, processor=processor))


@pytest.mark.parametrize(
    ("template", "texts", "num_rewritten"),
    [
        (templates.STRIPS_THINKING, ("<think>a</think>b", "c", "d"), 1),
        (templates.STRIPS_THINKING, ("a", "b", "<think>c</think>d"), 0),
        (templates.EMPTY_THOUGHT, ("a</think>b", "c</think>d", "e</think>f"), 3),
        (templates.DEFAULT_SYSTEM, ("a", "b", "c"), 0),
    ],
)
def test_replies_that_a_template_rewrites_are_counted_and_no_difference(
    policy: Policy, template: str, texts: tuple[str, ...], num_rewritten: int
) -> None:
    """What was sampled is trained on, whatever the template makes of thoughts later (TOK-05, verl #6854)."""
    renderer = with_template(policy, template)
    problem = Problem("p", "train", (Message("user", ("Find x.",)),), "12")
    env = Scenes(Message("user", ("No.",)), Message("user", ("Again.",)), None)
    trajectory, _ = run(renderer, env, tiny.saying(*texts), problem=problem)
    assert [turn.reply_text for turn in trajectory.turns] == list(texts)
    assert compare(trajectory, Prompt(problem.messages), renderer) == num_rewritten


NUMBERS_TURNS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}{% if loop.index > 3 %} {{ loop.index }}{% endif %}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def test_a_template_that_looks_at_more_than_the_message_is_found_out(policy: Policy) -> None:
    """It numbers the messages after the third: observations rendered by themselves cannot know."""
    renderer = with_template(policy, NUMBERS_TURNS)
    problem = Problem("p", "train", (Message("user", ("Find x.",)),), "12")
    env = Scenes(Message("user", ("No.",)), Message("user", ("Again.",)), None)
    trajectory, _ = run(renderer, env, tiny.saying("a", "b", "c"), problem=problem)
    with pytest.raises(ComparisonError, match="if the template looks at more than the message"):
        compare(trajectory, Prompt(problem.messages), renderer)


def test_a_template_that_drops_a_reply_has_no_canonical_form(policy: Policy) -> None:
    renderer = with_template(policy, templates.ONLY_LAST)
    with pytest.raises(TemplateError, match="drops a reply"):
        renderer.canonical(
            [Message("user", ("Find x.",))], [("a", Message("user", ("b",))), ("c", None)]
        )
