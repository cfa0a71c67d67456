"""What a trajectory is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import (
    Fraction,
    NonNegativeFloat,
    ObjectPath,
    PositiveFloat,
    PositiveInt,
    Section,
)

OVERLONG_TERM = "polyturn.reward:soft_overlong_punishment"


class RewardTermParams(Section):
    """One weighted reward term, `(trajectory, problem) -> float`."""

    term: ObjectPath
    weight: float = 1.0


class OverlongParams(Section):
    """Soft punishment of long trajectories (DAPO, arXiv:2503.14476, eq. 13); its factor is the term's weight."""

    max_tokens: PositiveInt  # sampled tokens from which on it is -1 (the paper's L_max)
    buffer_tokens: PositiveInt  # below max_tokens, over which it falls from 0 to -1 (L_cache)

    @model_validator(mode="after")
    def _buffer(self) -> OverlongParams:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} must not exceed max_tokens {self.max_tokens}"
            )
        return self


class RewardParams(Section):
    """What a finished trajectory is worth."""

    terms: Annotated[tuple[RewardTermParams, ...], Field(min_length=1)] = (
        RewardTermParams(term="polyturn.reward:correctness"),
    )
    rounding: Literal["reference", "strict"] = "reference"
    tolerance: NonNegativeFloat = 0.0  # relative
    timeout_s: PositiveFloat = 2.0  # of one symbolic comparison
    needs_box: bool = False  # an answer outside of \boxed{} or <answer> counts as none
    max_failure_fraction: Fraction = 0.05  # of a step's trajectories; above it the step stops
    overlong: OverlongParams | None = None  # for the term polyturn.reward:soft_overlong_punishment

    @model_validator(mode="after")
    def _weights(self) -> RewardParams:
        if not any(term.weight for term in self.terms):
            raise ValueError(
                "terms all have weight 0, so that every reward is 0 and nothing is learnt; give one of them another weight"
            )
        return self

    @model_validator(mode="after")
    def _overlong(self) -> RewardParams:
        if any(term.term == OVERLONG_TERM for term in self.terms) != (self.overlong is not None):
            raise ValueError(
                f"overlong holds the lengths of the term {OVERLONG_TERM} and is meaningless without, got overlong "
                f"{self.overlong}, terms {[term.term for term in self.terms]}"
            )
        return self
