"""Trajectories and demonstrations -> training samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyturn.envs.base import ToolSchema
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.render import Renderer
from polyturn.types import Group, ImageRecord, TrainingSample, Trajectory


def from_trajectory(trajectory: Trajectory, advantage: float) -> TrainingSample:
    """The sample of one trajectory: exactly what was sampled, nothing rendered again."""
    return TrainingSample(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        images=trajectory.images,
        advantage=advantage,
        id=f"{trajectory.problem.id}/{trajectory.group_index}/{trajectory.sibling}",
    )


def with_gradient(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
    *,
    keeps_zeros: bool = False,
) -> list[TrainingSample]:
    """Samples of all trajectories that carry a gradient, in (group, sibling) order.

    Groups of equal rewards (advantage 0), trajectories without reward (None) and those without a sampled token
    add nothing to the gradient, and are left out of its denominators. `keeps_zeros` keeps the first of these, which
    KL and entropy terms train on.
    """
    return [
        from_trajectory(trajectory, advantage)
        for group, row in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, row, strict=True)
        if advantage is not None and (advantage or keeps_zeros) and trajectory.num_sampled
    ]


def probe(groups: Sequence[Group]) -> list[TrainingSample]:
    """One sample of each group: enough to compare the learner's logprobs with the sampler's before an update."""
    first = [next((t for t in g.trajectories if t.num_sampled), None) for g in groups]
    return [from_trajectory(trajectory, 0.0) for trajectory in first if trajectory is not None]


def from_demonstration(
    demonstration: Demonstration, renderer: Renderer, tools: Sequence[ToolSchema] = ()
) -> TrainingSample:
    """The sample of a demonstrated conversation, masked to what its replies train; `tools` stand in its prompt."""
    prompt = renderer.prompt(demonstration.prompt, tools)
    token_ids: list[int] = list(prompt.token_ids)
    loss_mask = [0] * len(token_ids)
    images: list[ImageRecord] = list(prompt.images)
    mask: list[int] = []
    for turn in demonstration.turns:
        if isinstance(turn, Say):
            ids, spans = renderer.encode_reply(turn.text)
            mask = reply_mask(turn, spans)
            token_ids += ids
            loss_mask += mask
        else:
            rendered = renderer.observation(turn)
            token_ids += rendered.token_ids
            loss_mask += [0] * len(rendered.token_ids)
            images += rendered.images
    return TrainingSample(
        token_ids=np.array(token_ids, dtype=np.int64),
        loss_mask=np.array(loss_mask, dtype=np.int8),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        images=tuple(images),
        kind=demonstration.kind,
        num_answer_tokens=sum(mask),
    )


def reply_mask(reply: Say, spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token of a reply that is trained; a token counts if it overlaps a trained span.

    "zoom northwest" with only the word trained, tokens "zoom", " north", "west", end token:

        >>> reply_mask(Say("zoom northwest", ((5, 14),)), [(0, 4), (4, 10), (10, 14), (14, 14)])
        [0, 1, 1, 0]
    """
    if reply.trained is None:
        return [1] * len(spans)
    return [
        int(any(start < stop and end > begin for begin, stop in reply.trained))
        for start, end in spans
    ]
