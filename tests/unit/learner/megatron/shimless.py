"""An update with megatron-core on CPU, and what becomes of it when one shim is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

from polyturn.learner.megatron import parallel, shims
from polyturn.learner.megatron.config import transformer_config
from polyturn.learner.megatron.optimizer import Stepper
from polyturn.learner.megatron.shims import Shim
from polyturn.world import World
from tests.unit.learner.megatron.cases import CPU, learner_params
from tests.unit.learner.megatron.facts import FACTS


@dataclass(frozen=True)
class Found:
    """`failures`: of an update without each shim, by its place; None: it went well all the same."""

    with_all: str | None
    failures: dict[tuple[str, str], str | None]
    is_left_alone_with_cuda: bool
    type_for_others: str


def without_each(world: World) -> Found:
    """Leave out one shim after the other."""
    original = torch.cuda.current_device
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        shims.apply()
    is_left_alone = torch.cuda.current_device is original
    params = learner_params(precision="bfloat16")
    with mock.patch.object(shims, "apply"):
        layout = parallel.set_up(world, params, CPU)
    needed = shims.needed()
    with applied(needed):
        type_for_others = torch.zeros(1).type()
        with_all = failure(layout)
    failures: dict[tuple[str, str], str | None] = {}
    for left_out in needed:
        with applied([shim for shim in needed if shim is not left_out]):
            failures[left_out.owner, left_out.attribute] = failure(layout)
    return Found(with_all, failures, is_left_alone, type_for_others)


@contextmanager
def applied(chosen: list[Shim]) -> Iterator[None]:
    with ExitStack() as stack:
        for shim in chosen:
            stack.callback(shim.put())
        yield


def failure(layout: parallel.Layout) -> str | None:
    """Two updates of a small module, in float32 and in bfloat16 with main weights; the error, or None."""
    try:
        for precision in ("float32", "bfloat16"):
            update(layout, precision)
    except (RuntimeError, AssertionError, TypeError) as error:
        return str(error)
    return None


def update(layout: parallel.Layout, precision: str) -> None:
    params = learner_params(precision=precision, grad_clip=0.1)
    config = transformer_config(FACTS, params)
    module = nn.Linear(4, 3, dtype=config.params_dtype)
    stepper = Stepper({"language": module}, config, params, layout)
    before = module.weight.detach().clone()
    stepper.zero_gradients()
    module(torch.ones(2, 4, dtype=config.params_dtype)).sum().backward()
    assert stepper.finish_gradients() > 0.1
    stepper.step(0.1, with_tower=False)
    assert not torch.equal(module.weight, before)
