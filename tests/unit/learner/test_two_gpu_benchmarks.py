"""What the benchmarks of two GPUs compute beside running: gaps between runs, and a tower that each rank runs whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.replicated_tower import replicated
from benchmarks.two_gpu_learners_cases import LR, Case, Run
from benchmarks.two_gpu_learners_gaps import bfloat16_agrees, float32_agrees, gap_of
from polyturn.world import ONE, World
from tests.unit import ranks, tiny
from tests.unit.learner.megatron_scenarios import (
    MEGATRON,
    TP2,
    TWO_KV_HEADS,
    two_pictures_each,
)
from tests.unit.learner.scenarios import Kind, Tensors, update

CASE = Case("FSDP x1", "float32", 1e-8)


def run(loss: float = 2.0, norm: float = 4.0) -> Run:
    return Run(CASE, [loss, 1.0], [norm, 1.0], 0.0)


def test_a_gap_is_relative_to_the_way_and_to_the_learning_rate() -> None:
    mine = {"a": LR * torch.tensor([3.0, 4.0]), "b": LR * torch.tensor([[0.0, 12.0]])}
    theirs = {"a": LR * torch.tensor([3.0, 4.0]), "b": LR * torch.tensor([[5.0, 12.0]])}
    found = gap_of(run(2.002), mine, run(), theirs)
    assert found.loss == pytest.approx(1e-3)
    assert found.grad_norm == found.last_loss == 0.0
    assert found.way == pytest.approx(5 / math.sqrt(25 + 169))
    assert found.cosine == pytest.approx(169 / math.sqrt(169 * 194))
    assert found.mean_weight == pytest.approx(2.5)
    assert (found.worst_tensor, found.worst_way) == ("b", pytest.approx(5 / 13))
    assert found.largest_weight == pytest.approx(5.0)


def test_what_is_within_and_what_is_not() -> None:
    ways = {"a": LR * torch.tensor([3.0, 4.0])}
    same, near, far = (
        gap_of(run(2.0 * (1 + by)), {"a": ways["a"] * (1 + by)}, run(), ways)
        for by in (0.0, 5e-5, 5e-3)
    )
    assert float32_agrees(near, near)
    assert not float32_agrees(far, same)
    assert not float32_agrees(same, far)
    assert bfloat16_agrees(far, far)
    assert not bfloat16_agrees(far, near)


def first_gradients(kind: Kind, world: World) -> Tensors:
    learner = kind.build(tiny.qwen3(TWO_KV_HEADS), world=world, **kind.layout)
    update(learner, two_pictures_each(learner.renderer))
    return kind.gradients(learner)


def with_replicated_tower(world: World) -> Tensors:
    with replicated():
        return first_gradients(TP2, world)


def test_a_replicated_tower_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    found = ranks.run("tests.unit.learner.test_two_gpu_benchmarks:with_replicated_tower", tmp_path)
    alone = first_gradients(MEGATRON, ONE)
    for rank in found:
        assert isinstance(rank.outcome, dict), rank.output
        for name, gradient in alone.items():
            error = (rank.outcome[name] - gradient).norm() / gradient.norm().clamp(min=1e-7)
            assert error < 1e-4, name
