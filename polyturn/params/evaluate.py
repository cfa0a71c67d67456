"""The last word on a policy."""

from __future__ import annotations

from polyturn.params.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvaluateParams(Section):
    """The last word: warm start and published policy on the test split."""

    temperature: PositiveFloat = 1.0
    samples_per_problem: PositiveInt = 1  # pass@k for k up to it
    greedy: bool = True  # score argmax decoding as well
    bootstrap_samples: PositiveInt = 2000
    batch_size: PositiveInt = 128  # trajectories sampled together
    num_saved_trajectories: NonNegativeInt = 24  # kept with pictures for the report
