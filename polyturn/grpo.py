"""GRPO (arXiv:2402.03300), top to bottom: sample groups, grade, compare siblings, update, repeat.

Every random choice derives from (seed, step), so a resumed step is sampled again from its start and comes out the
same. Every rank of a run runs this file: groups are sampled by the rank that owns them and then known to all, so that
all ranks compute the same advantages, metrics and decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from polyturn import blind
from polyturn.advantage import advantages_of
from polyturn.params import Params
from polyturn.rollout import RolloutSettings
from polyturn.samples import probe, with_gradient
from polyturn.seeds import derive
from polyturn.training import debug, run_state, stop_rules
from polyturn.training.checks import check_gap, check_updates
from polyturn.training.clock import Clock
from polyturn.training.collect import check_start
from polyturn.training.gap import gap_metrics, mean_gap
from polyturn.training.metrics import Metrics, rollout_metrics, trajectories_of, update_metrics
from polyturn.training.overlap import Rollouts
from polyturn.training.parts import Parts
from polyturn.training.run_state import Best, RunState
from polyturn.training.stop_rules import Stopped
from polyturn.training.turn_metrics import env_times
from polyturn.training.updates import run_updates
from polyturn.training.validation import validate
from polyturn.types import Group


@dataclass(frozen=True)
class TrainingOutcome:
    """The published policy, the best by the lower bound of its validation interval; `stopped`: before train.steps."""

    best: Best
    stopped: Stopped | None = None


async def train(parts: Parts, params: Params, *, resume: bool) -> TrainingOutcome:
    """Run the loop until train.steps, a stop rule or a stop request, and publish the best policy.

    Raises:
        TrainingError: non-finite loss or gradients (samples are dumped), sampler and learner too far apart.
        FailureBudgetError: the environment or the grader failed too often.
        BlindModelError: the policy does not see the pictures.
        CheckpointError: the run that is resumed is further than train.steps.
        ValueError: its steps cannot be sampled as params say; see `check_start`.
    """
    check_start(parts.train, params)
    rollouts = Rollouts(parts, params)
    state = run_state.start(
        parts.checkpoints, rollouts.load, num_steps=params.train.steps, resume=resume
    )
    parts.recorder.begin(state.history)
    best, step, stopped = state.best, state.step, None
    clock = Clock(state.hours, parts.world.size)
    parts.sampler.update_weights(parts.learner.export_weights(), step)
    await _check_sight(parts, params)
    while step < params.train.steps:
        if stopped := _stop(parts, params, step, clock.hours):
            break
        metrics: Metrics = {}
        clock.begin_step()
        if step % params.train.eval_every == 0:
            best = await _score(parts, params, step, best, metrics)
            clock.lap("perf/eval_time")
        groups = await rollouts.take(step, clock)
        advantages = advantages_of(groups.kept, params.loss)
        metrics |= rollout_metrics(groups.sampled, seed=step) | groups.metrics
        if params.train.debug.mode != "rollout_only":
            learn = partial(_learn, parts, params, step, groups.kept, advantages)
            metrics |= await rollouts.beside(step, learn, clock)
            parts.sampler.update_weights(parts.learner.export_weights(), step + 1)
        parts.recorder.rollout(step, groups.kept, advantages)
        times = clock.times | env_times(trajectories_of(groups.sampled))
        times |= parts.sampler.take_metrics()
        parts.recorder.step(step, metrics, times)
        step += 1
        if step % params.train.checkpoint_every == 0:
            now = RunState(step=step, best=best, history=parts.recorder.history, hours=clock.hours)
            run_state.save(parts.checkpoints, now, rollouts.snapshot, parts.candidates)
    metrics = {}
    best = await _score(parts, params, step, best, metrics)
    parts.recorder.end(step, metrics)
    return TrainingOutcome(best, stopped)


async def _check_sight(parts: Parts, params: Params) -> None:
    if params.train.debug.mode != "train_only":
        settings = RolloutSettings.of(params)
        seed = derive(params.seed, "blind")
        with parts.world.together():
            await blind.check(parts.train, parts.sampler, parts.renderer, settings, seed=seed)


def _stop(parts: Parts, params: Params, step: int, hours: float) -> Stopped | None:
    """Whether a rule or somebody ends the run here; rank 0's clock and files decide for all."""
    reason = parts.stop_request() or stop_rules.reason_to_stop(
        parts.recorder.history, hours, params.train.stop
    )
    reason = parts.world.broadcast(reason)
    return None if reason is None else Stopped(step, reason)


async def _score(parts: Parts, params: Params, version: int, best: Best, metrics: Metrics) -> Best:
    """Validate the present policy, add to `metrics`, publish it if no earlier one has a better lower bound."""
    if params.train.debug.mode == "train_only":  # nothing is sampled: the last policy is published
        score = debug.unscored(version)
    else:
        parts.recorder.enters("evaluation", version)
        parts.learner.offload()
        score, scored = await validate(parts, params, version)
        parts.learner.onload()
        metrics |= scored
    if score.accuracy_low < best.accuracy_low:
        return best
    parts.candidates.publish(version, parts.learner.export_weights())
    return score


def _learn(
    parts: Parts,
    params: Params,
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
) -> Metrics:
    """Compare sampler and learner, then update on every trajectory that carries a gradient."""
    parts.recorder.enters("update", step)
    probed = probe(groups)
    own = parts.learner.logprobs(probed)
    apart = gap_metrics(probed, own, parts.renderer.family.image_token_id)
    gap = mean_gap(apart)
    alarm = check_gap(gap, params.train, step)
    samples = with_gradient(groups, advantages, keeps_zeros=params.loss.trains_without_advantage)
    updates = run_updates(parts, params, step, samples)
    check_updates(updates, params, step)
    return update_metrics(updates, gap=gap) | apart | alarm
