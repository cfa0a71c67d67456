"""The optimizer updates of a step: its samples split at random, each part one update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyturn.learner.base import Logprobs, NonFiniteError, UpdateStats
from polyturn.params import Params
from polyturn.seeds import derive
from polyturn.training import debug
from polyturn.training.checks import TrainingError
from polyturn.training.parts import Parts
from polyturn.training.schedule import lr_scale
from polyturn.types import TrainingSample


def run_updates(
    parts: Parts, params: Params, step: int, samples: Sequence[TrainingSample]
) -> list[UpdateStats]:
    """Train on every sample once, in train.updates_per_rollout updates; a part without samples is none.

    A single update is on-policy: its old logprobs are its own. Several compare with learner.old_logprobs, as they
    were before the first.

    Raises:
        TrainingError: loss or gradients are not finite; the samples are dumped.
    """
    chosen = split(
        len(samples), params.train.updates_per_rollout, derive(params.seed, "updates", step)
    )
    if step == params.train.debug.dump_step and parts.world.is_main:
        batch = [[samples[index] for index in part] for part in chosen]
        debug.write_batch(parts.recorder.trajectory_dir, step, batch)
    old = None
    if len(chosen) > 1 and params.learner.old_logprobs == "learner":
        old = parts.learner.logprobs(samples)
    return [
        _update(
            parts,
            params,
            step,
            [samples[index] for index in part],
            None if old is None else [old[index] for index in part],
        )
        for part in chosen
        if part
    ]


def split(count: int, parts: int, seed: int) -> list[list[int]]:
    """The numbers below `count` in a random order, dealt out to `parts` lists whose lengths differ by at most one."""
    order = np.random.default_rng(seed).permutation(count)
    return [[int(index) for index in order[part::parts]] for part in range(parts)]


def _update(
    parts: Parts,
    params: Params,
    step: int,
    samples: Sequence[TrainingSample],
    old: Sequence[Logprobs] | None,
) -> UpdateStats:
    try:
        return parts.learner.update(
            samples,
            lr_scale=lr_scale(step, params.learner),
            is_on_policy=params.train.updates_per_rollout == 1,
            old_logprobs=old,
        )
    except NonFiniteError as error:
        path = parts.recorder.dump(step, samples, str(error))
        raise TrainingError(
            f"step {step}: {error}; the samples are in {path}; lower learner.lr, now {params.learner.lr}, "
            "or look for a broken reward"
        ) from None
