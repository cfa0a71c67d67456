"""What an update minimises; formulas, papers and other libraries' names are in docs/grpo.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import NonNegativeFloat, PositiveFloat, Section


class LossParams(Section):
    """The clipped surrogate (GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783)."""

    # What an advantage is measured against: grpo, the mean of the group; rloo, the mean of the other siblings
    # (arXiv:2402.14740); reinforce_plus_plus_baseline, the mean of the group, scaled by the deviation of the
    # whole rollout batch (arXiv:2501.03262).
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline"] = "grpo"
    # Divide advantages by the standard deviation of the group (of the batch: reinforce_plus_plus_baseline).
    # RLOO and Dr. GRPO as published do not.
    normalize_std: bool = True

    # clip: min(r A, clip(r) A). cispo: the clipped ratio is a detached weight (arXiv:2506.13585).
    surrogate: Literal["clip", "cispo"] = "clip"
    # sequence: one ratio a sequence, the geometric mean of its tokens' (GSPO arXiv:2507.18071); its clip bounds
    # are a hundred times smaller, 3e-4 and 4e-4 in the paper.
    ratio_level: Literal["token", "sequence"] = "token"
    clip_low: PositiveFloat = 0.2  # ratios are clipped to 1 - clip_low ... 1 + clip_high
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # arXiv:1912.09729

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_divisor: PositiveFloat | None = None  # tokens; for aggregation: constant

    kl_coef: NonNegativeFloat = 0.0  # weight of KL(policy, reference) in the loss; 0: no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # http://joschu.net/blog/kl-approx.html
    entropy_coef: NonNegativeFloat = 0.0  # weight of the entropy bonus in the loss

    # Importance weights for the gap between sampler and learner (TIS; masked: IcePop, MIS), of a token or, as the
    # product over its tokens, of a sequence; outside of tis_clip_low ... tis_clip they are truncated or masked to 0.
    tis_mode: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    tis_clip: Annotated[float, Field(ge=1)] = 2.0
    tis_clip_low: Annotated[float, Field(ge=0, le=1)] = 0.0

    # Stops a run that starts wrong: before a rollout's first update the mean |ratio - 1|, and before a run's first
    # the mean |policy - reference| logprob, must be below it. 1e-5 holds in float32.
    start_tolerance: PositiveFloat = 0.05

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of a reference model are needed; without, none is loaded."""
        return self.kl_coef > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy of the policy must carry a gradient."""
        return self.entropy_coef > 0

    @property
    def trains_without_advantage(self) -> bool:
        """Whether a sample whose advantage is 0 still has a gradient (that of the KL or of the entropy)."""
        return self.needs_reference or self.needs_entropy_gradient

    @model_validator(mode="after")
    def _divisor(self) -> LossParams:
        if (self.aggregation == "constant") != (self.constant_divisor is not None):
            raise ValueError(
                "constant_divisor is needed with aggregation: constant and meaningless without, got "
                f"aggregation {self.aggregation!r}, constant_divisor {self.constant_divisor}"
            )
        return self

    @model_validator(mode="after")
    def _estimator(self) -> LossParams:
        if self.advantage_estimator == "reinforce_plus_plus_baseline" and not self.normalize_std:
            raise ValueError(
                "advantage_estimator reinforce_plus_plus_baseline divides by the deviation of the batch, but "
                "normalize_std is false; without a deviation it is advantage_estimator: grpo"
            )
        return self

    @model_validator(mode="after")
    def _surrogate(self) -> LossParams:
        if self.surrogate == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"dual_clip {self.dual_clip} bounds surrogate: clip and does nothing with cispo; set it to null"
            )
        return self
