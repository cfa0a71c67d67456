"""The training loop."""

from __future__ import annotations

from polyturn.params.fields import PositiveFloat, PositiveInt, Section


class TrainParams(Section):
    """The training loop."""

    steps: PositiveInt = 40  # rollout batches
    updates_per_rollout: PositiveInt = 2
    eval_every: PositiveInt = 20  # steps between scores on the validation split
    eval_batch_size: PositiveInt = 128  # trajectories of a score sampled together
    eval_bootstrap_samples: PositiveInt = 2000  # behind a score's interval
    checkpoint_every: PositiveInt = 20
    resume: str = (
        "auto"  # auto: continue an equal key; never: start anew; RUN_ID: continue that run
    )
    work_uri: str = ""  # where checkpoints in progress live; empty: .polyturn/work
    max_logprob_gap: PositiveFloat = (
        0.5  # mean |sampler - learner| logprob above which the run stops
    )
