"""Supervised warm start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from polyturn.params.fields import (
    Beta,
    NonNegativeFloat,
    NonNegativeInt,
    ObjectPath,
    PositiveFloat,
    PositiveInt,
    Section,
)


class PhaseParams(Section):
    """One phase of the warm start: a mix of examples, trained until its gates or a number of steps."""

    name: str
    # kind of example -> share of the batch
    mix: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    batch_size: PositiveInt = 64
    lr: PositiveFloat
    warmup_steps: NonNegativeInt = 0  # linear, from the phase's first step on
    max_steps: PositiveInt
    freeze_vision: bool = False
    # kind -> nats: the phase ends when each kind's loss per last reply, a mean over gate_window steps, is below
    gates: dict[str, PositiveFloat] = Field(default_factory=dict)
    gate_window: PositiveInt = 10
    decay_steps: NonNegativeInt = 0  # linear decay to 3% after the gates

    @model_validator(mode="after")
    def _kinds(self) -> PhaseParams:
        unknown = sorted(set(self.gates) - set(self.mix))
        if unknown:
            raise ValueError(f"gates name {unknown}, which mix {sorted(self.mix)} does not have")
        return self


class WarmstartParams(Section):
    """Supervised warm start (also the SFT recipe); no phases: the base model is passed on."""

    examples: ObjectPath = "polyturn.envs.zoom:demonstrations"  # (kind, problem, rng, params)
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: NonNegativeFloat = 0.01
    grad_clip: PositiveFloat = 1.0
    micro_batch_tokens: PositiveInt = 4096  # packed tokens of one micro-batch
    vision_cache_mb: PositiveInt = 512  # decoded pictures, and again the features of a frozen tower
    phases: tuple[PhaseParams, ...] = ()
    example_params: dict[str, float] = Field(
        default_factory=dict
    )  # passed to the examples callable
