"""What an update minimises."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import PositiveFloat, Section


class LossParams(Section):
    """The clipped surrogate (GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783)."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # arXiv:1912.09729
    normalize_std: bool = True  # divide advantages by the group's standard deviation
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_divisor: PositiveFloat | None = None  # tokens; for aggregation: constant

    @model_validator(mode="after")
    def _divisor(self) -> LossParams:
        if (self.aggregation == "constant") != (self.constant_divisor is not None):
            raise ValueError(
                "constant_divisor is needed with aggregation: constant and meaningless without, got "
                f"aggregation {self.aggregation!r}, constant_divisor {self.constant_divisor}"
            )
        return self
