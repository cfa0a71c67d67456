"""Who turns batches into new weights."""

from __future__ import annotations

from typing import Literal

from polyturn.params.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class LearnerParams(Section):
    """Who turns batches into new weights."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    num_processes: PositiveInt = 1
    num_threads: PositiveInt = 1  # of torch on CPU; two are slower at the demo's size
    lr: PositiveFloat = 3e-4
    warmup_steps: NonNegativeInt = 5  # rollout batches
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay_steps: PositiveInt = 40  # horizon of the schedule, in rollout batches
    min_lr_fraction: Fraction = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    freeze_vision: bool = True
    micro_batch_tokens: PositiveInt = 4096  # padded tokens of one micro-batch
