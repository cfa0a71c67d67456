"""Limits and shape of a rollout batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyturn.params.fields import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class RolloutParams(Section):
    """Limits and shape of a rollout batch."""

    prompts_per_step: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    max_turns: PositiveInt = 6
    max_new_tokens: PositiveInt = 192  # sampled tokens over all turns
    max_turn_tokens: PositiveInt | None = (
        24  # sampled tokens of one turn; None: no limit of its own
    )
    max_context_tokens: PositiveInt = 1024  # prompt, pads, replies and observations together
    temperature: PositiveFloat = 1.0
    # of the trajectories: compared, id for id, with the chat template's rendering of the whole conversation
    compare_fraction: Fraction = 0.1
    blind_problems: NonNegativeInt = 8  # probed before training: does the policy look? 0: no probe
    # nats by which logprobs must move, on average, when pictures are replaced by blank ones; float32 noise is
    # 1e-6, bfloat16 servers have 0.03 and need more
    blind_min_change: PositiveFloat = 1e-4
