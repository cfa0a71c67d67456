"""Compares a trajectory's token stream with the chat template's own rendering of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.envs.base import ToolSchema
from polyturn.render import Renderer
from polyturn.types import Message, Trajectory

_CONTEXT = 12  # tokens shown on either side of a difference


@dataclass(frozen=True)
class Prompt:
    """What a trajectory's first tokens were rendered from (the first observation included)."""

    messages: tuple[Message, ...]
    tools: Sequence[ToolSchema] = ()


class ComparisonError(ValueError):
    """What is trained on is not the conversation; the message shows where."""


def compare(trajectory: Trajectory, prompt: Prompt, renderer: Renderer) -> int:
    """Check a rewarded trajectory id for id; returns how many replies the template would show otherwise.

    Expected are the template's own pieces around the replies, each rendered with everything before it, and the
    sampled ids verbatim: a reply that is not the canonical tokenisation of its text is no difference. Nor is a
    template that strips thoughts from earlier replies, since what was sampled is trained on; it is counted.

        prompt | a a a e | n o o o | a a e      mask 0 | 1 1 1 1 | 0 0 0 0 | 1 1 1

    Raises:
        ComparisonError: ids or mask differ.
        TemplateError: the template drops replies.
    """
    turns = trajectory.turns
    canonical = renderer.canonical(
        prompt.messages, [(turn.reply_text, turn.observation) for turn in turns], prompt.tools
    )
    end = renderer.family.end_of_turn_id
    token_ids: list[int] = []
    loss_mask: list[int] = []

    def add(ids: Sequence[int], bit: int) -> None:
        token_ids.extend(ids)
        loss_mask.extend([bit] * len(ids))

    add(canonical.pieces[0].token_ids, 0)
    for turn, piece in zip(turns, (*canonical.pieces[1:], None), strict=True):
        add(turn.reply_ids, 1)
        if piece is not None:
            is_ended = turn.reply_ids[-1:] == (end,)
            add(piece.token_ids if is_ended else (end, *piece.token_ids), 0)
    _check("token ids", trajectory.token_ids.tolist(), token_ids, trajectory, renderer)
    if trajectory.loss_mask.tolist() != loss_mask:
        place = _first_difference(trajectory.loss_mask.tolist(), loss_mask)
        raise ComparisonError(f"{_name(trajectory)}: the loss mask is wrong from token {place} on")
    return canonical.num_rewritten


def _check(
    what: str,
    ours: list[int],
    theirs: list[int],
    trajectory: Trajectory,
    renderer: Renderer,
) -> None:
    if ours == theirs:
        return
    place = _first_difference(ours, theirs)
    start, end = max(0, place - _CONTEXT), place + _CONTEXT
    raise ComparisonError(
        f"{_name(trajectory)}: {what} differ from the rendered conversation from {place} of {len(ours)} on "
        f"(rendered: {len(theirs)}): {renderer.decode(ours[start:end])!r} is trained on, the chat template "
        f"renders {renderer.decode(theirs[start:end])!r}; if the template looks at more than the message it "
        "renders, it cannot be used for exact training"
    )


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    shared = min(len(ours), len(theirs))
    different = np.flatnonzero(np.array(ours[:shared]) != np.array(theirs[:shared]))
    return int(different[0]) if len(different) else shared


def _name(trajectory: Trajectory) -> str:
    return f"problem {trajectory.problem.id} group {trajectory.group_index} sibling {trajectory.sibling}"
