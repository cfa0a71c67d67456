"""Ranks that wait for another one's rollout: `python -m pytest -m gpu tests/gpu/test_waiting_cuda.py` with two GPUs."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyturn.world import World
from tests.unit import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TIMEOUT_S = 5.0
ROLLOUT_S = 2.5 * TIMEOUT_S


def summed(group: dist.ProcessGroup, world: World) -> float:
    """A sum over the ranks as an update has it."""
    device = torch.device("cuda", world.rank) if torch.cuda.is_available() else torch.device("cpu")
    value = torch.full((1,), world.rank + 1.0, device=device)
    dist.all_reduce(value, group=group)
    return float(value)


def impatient_group() -> dist.ProcessGroup:
    """What training sums over, with a short timeout."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_0_samples_for_long(world: World) -> tuple[float, float, list[int]]:
    """An update, a rollout of which rank 0's part takes longer than the timeout, another update."""
    group = impatient_group()
    before = summed(group, world)
    if world.is_main:
        time.sleep(ROLLOUT_S)
    gathered = world.all_gather(world.rank)
    return before, summed(group, world), gathered


def rank_0_is_awaited_in_training(world: World) -> float:
    """The same wait inside of the training's group, which is what must not happen."""
    group = impatient_group()
    summed(group, world)
    if world.is_main:
        time.sleep(ROLLOUT_S)
    return summed(group, world)


def test_a_rollout_longer_than_the_timeout_of_nccl_is_waited_for(tmp_path: Path) -> None:
    for rank in ranks.run("tests.gpu.test_waiting_cuda:rank_0_samples_for_long", tmp_path):
        assert rank.outcome == (3.0, 3.0, [0, 1]), rank.output


def test_the_timeout_is_in_force(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    _, waiting = ranks.run("tests.gpu.test_waiting_cuda:rank_0_is_awaited_in_training", tmp_path)
    assert isinstance(waiting.outcome, Exception) or waiting.exit_code != 0, waiting.outcome
