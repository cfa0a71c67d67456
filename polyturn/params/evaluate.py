"""The last word on a policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyturn.params.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvaluateParams(Section):
    """The last word: warm start and published policy on the test split."""

    temperature: PositiveFloat = 1.0
    samples_per_problem: PositiveInt = 1  # pass@k for k up to it
    greedy: bool = True  # score argmax decoding as well
    bootstrap_samples: PositiveInt = 2000
    batch_size: PositiveInt = 128  # trajectories sampled together
    num_saved_trajectories: NonNegativeInt = 24  # kept with pictures for the report
    # Columns of the problems whose values together name a problem's kind ("square area"), for scores by kind.
    kind_columns: tuple[str, ...] = ("kind",)
    # Share of the test split, chosen by problem id, that is set apart: the evaluate stage leaves it out, and only
    # `polyturn evaluate --sealed` and `polyturn promote --sealed` score it; each time is counted.
    sealed_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
