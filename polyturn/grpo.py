"""GRPO (arXiv:2402.03300), top to bottom: sample groups, grade, compare siblings, update, repeat.

Every random choice derives from (seed, step), so a resumed step is sampled again from its start and comes out the
same. Not in this version: KL to a reference, dynamic sampling, several processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyturn import run_state
from polyturn.advantage import advantages_of
from polyturn.candidates import Candidates
from polyturn.learner.base import Learner, NonFiniteError, UpdateStats
from polyturn.metrics import Metrics, rollout_metrics, update_metrics
from polyturn.params import Params
from polyturn.recorder import Recorder
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.run_state import Best, RunState
from polyturn.sampler.base import Sampler
from polyturn.samples import probe, with_gradient
from polyturn.schedule import draw_problems, lr_scale
from polyturn.seeds import derive
from polyturn.types import Group, Problem, TrainingSample
from polyturn.validation import validate


class TrainingError(RuntimeError):
    """Training stopped; the message says at which step and what to do."""


@dataclass(frozen=True)
class Parts:
    """What a training run is put together from."""

    sampler: Sampler
    learner: Learner
    renderer: Renderer
    train: Sequence[Problem]
    validation: Sequence[Problem]
    recorder: Recorder
    checkpoints: Path
    candidates: Candidates


async def train(parts: Parts, params: Params, *, resume: bool) -> Best:
    """Run the loop and return the published policy: the best by the lower bound of its validation interval.

    Raises:
        TrainingError: non-finite loss or gradients (samples are dumped), sampler and learner too far apart.
        FailureBudgetError: the environment or the grader failed too often.
        CheckpointError: the run that is resumed is further than train.steps.
    """
    state = run_state.start(
        parts.checkpoints, parts.learner.load, num_steps=params.train.steps, resume=resume
    )
    parts.recorder.begin(state.history)
    best = state.best
    parts.sampler.update_weights(parts.learner.export_weights(), state.step)
    for step in range(state.step, params.train.steps):
        metrics: Metrics = {}
        if step % params.train.eval_every == 0:
            best = await _score(parts, params, step, best, metrics)
        started = time.monotonic()
        groups = await _sample(parts, params, step)
        sampled = time.monotonic()
        advantages = advantages_of(groups, params.loss)
        gap = parts.learner.logprob_gap(probe(groups))
        _check_gap(gap, params, step)
        samples = with_gradient(
            groups, advantages, keeps_zeros=params.loss.trains_without_advantage
        )
        updates = _update(parts, params, step, samples)
        updated = time.monotonic()
        parts.sampler.update_weights(parts.learner.export_weights(), step + 1)
        metrics |= rollout_metrics(groups, seed=step) | update_metrics(updates, gap=gap)
        times = {"perf/rollout_time": sampled - started, "perf/train_time": updated - sampled}
        parts.recorder.rollout(step, groups, advantages)
        parts.recorder.step(step, metrics, times)
        if (step + 1) % params.train.checkpoint_every == 0:
            now = RunState(step=step + 1, best=best, history=parts.recorder.history)
            run_state.save(parts.checkpoints, now, parts.learner.save)
            parts.candidates.prune(run_state.best_versions(parts.checkpoints))
    metrics = {}
    best = await _score(parts, params, params.train.steps, best, metrics)
    parts.recorder.end(params.train.steps, metrics)
    return best


async def _sample(parts: Parts, params: Params, step: int) -> list[Group]:
    problems = draw_problems(
        parts.train, params.rollout.prompts_per_step, seed=params.seed, step=step
    )
    draw = Draw(
        derive(params.seed, "rollout", step), params.rollout.group_size, params.rollout.temperature
    )
    return await rollout(problems, parts.sampler, parts.renderer, RolloutSettings.of(params), draw)


async def _score(parts: Parts, params: Params, version: int, best: Best, metrics: Metrics) -> Best:
    """Validate the present policy, add to `metrics`, publish it if no earlier one has a better lower bound."""
    score, scored = await validate(parts.validation, parts.sampler, parts.renderer, params, version)
    metrics |= scored
    if score.accuracy_low < best.accuracy_low:
        return best
    parts.candidates.publish(version)
    return score


def _update(
    parts: Parts, params: Params, step: int, samples: Sequence[TrainingSample]
) -> list[UpdateStats]:
    """Split the samples at random into updates; a single one is on-policy, several are clipped against the sampler."""
    number = params.train.updates_per_rollout
    order = np.random.default_rng(derive(params.seed, "updates", step)).permutation(len(samples))
    updates: list[UpdateStats] = []
    for part in range(number):
        chosen = [samples[int(index)] for index in order[part::number]]
        if chosen:
            updates.append(_checked_update(parts, params, step, chosen))
    return updates


def _check_gap(gap: float, params: Params, step: int) -> None:
    if not gap <= params.train.max_logprob_gap:
        raise TrainingError(
            f"step {step}: sampler and learner differ by {gap:.3f} nats a token, more than "
            f"train.max_logprob_gap {params.train.max_logprob_gap}; check that both see the same pictures and weights"
        )


def _checked_update(
    parts: Parts, params: Params, step: int, samples: Sequence[TrainingSample]
) -> UpdateStats:
    is_on_policy = params.train.updates_per_rollout == 1
    try:
        return parts.learner.update(
            samples, lr_scale=lr_scale(step, params.learner), is_on_policy=is_on_policy
        )
    except NonFiniteError as error:
        path = parts.recorder.dump(step, samples, str(error))
        raise TrainingError(
            f"step {step}: {error}; the samples are in {path}; lower learner.lr, now {params.learner.lr}, "
            "or look for a broken reward"
        ) from None
