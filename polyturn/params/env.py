"""The interactive environment."""

from __future__ import annotations

from pydantic import Field

from polyturn.params.fields import Fraction, NonNegativeInt, ObjectPath, PositiveFloat, Section


class EnvParams(Section):
    """The interactive environment."""

    build: ObjectPath = "polyturn.envs.zoom:build_env"
    params: dict[str, object] = Field(default_factory=dict)  # handed to build_env as `params`
    # over params while validating and evaluating, e.g. {oracle: false}
    eval_params: dict[str, object] = Field(default_factory=dict)
    tools_in_prompt: bool = True  # show the function schemas in the prompt
    step_timeout_s: PositiveFloat = (
        30.0  # of each call of the environment: build, reset, step, close
    )
    # fresh attempts at a trajectory whose environment failed, each from its start with sampling seeds of its own
    retries: NonNegativeInt = 0
    max_failure_fraction: Fraction = (
        0.1  # of a step's or an evaluation's trajectories, after retries; above it that stops
    )
