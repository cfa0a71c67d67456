"""Memory that moves to the host and back under tensors that stay the same objects."""

from __future__ import annotations

import pytest
import torch

from polyturn.learner.offload import HostCopy, local
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from tests.unit.learner.scenarios import (
    assert_refuses_to_work,
    learner_of,
    samples,
    update,
    weights_of,
)


def test_contents_come_back_and_views_stay_views() -> None:
    whole = torch.arange(12.0).view(3, 4)
    row = whole[1]
    weight = torch.nn.Parameter(torch.full((5,), 7.0, dtype=torch.bfloat16))
    copy = HostCopy()
    copy.take([whole, row, weight, torch.zeros(0)])
    assert copy.is_away
    assert whole.untyped_storage().nbytes() == weight.untyped_storage().nbytes() == 0
    copy.give_back()
    assert not copy.is_away
    assert torch.equal(whole, torch.arange(12.0).view(3, 4))
    assert torch.equal(weight, torch.full((5,), 7.0, dtype=torch.bfloat16))
    row.fill_(-1.0)
    assert whole[1].tolist() == [-1.0] * 4


def test_buffers_are_kept_for_the_next_time_and_replaced_when_sizes_change() -> None:
    copy, one = HostCopy(), torch.ones(8)
    copy.take([one])
    first = copy._buffers[0].data_ptr()
    copy.give_back()
    one.fill_(2.0)
    copy.take([one])
    assert copy._buffers[0].data_ptr() == first
    copy.give_back()
    assert one.tolist() == [2.0] * 8
    two = torch.full((16,), 3.0)
    copy.take([two, one])
    copy.give_back()
    assert (two.tolist(), one.tolist()) == ([3.0] * 16, [2.0] * 8)


def test_on_cpu_it_warns_once_and_does_nothing(
    policy: Policy, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_of(policy, offload=True)
    assert caplog.text.count("learner.offload: true does nothing on cpu") == 1
    update(learner, samples(renderer))
    assert learner.offload() == learner.onload() == 0.0
    assert all(p.untyped_storage().nbytes() for p in learner.parameters.values())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_that_was_away_comes_back_as_it_was(policy: Policy, precision: str) -> None:
    """Weights, moments and the reference; in bfloat16 they are FSDP's."""
    learner, other = (
        learner_of(policy, precision=precision, loss={"kl_coef": 0.1}) for _ in range(2)
    )
    chosen = samples(learner.renderer)
    for one in (learner, other):
        update(one, chosen)
    learner._memory.free()
    away = [*learner.parameters.values(), *learner._reference.scorer.policy.model.parameters()]
    assert not any(local(tensor.detach()).untyped_storage().nbytes() for tensor in away)
    learner._memory.take_back()
    stats = [update(one, chosen) for one in (learner, other)]
    assert stats[0] == stats[1]
    wanted = weights_of(other)
    assert all(torch.equal(value, wanted[name]) for name, value in weights_of(learner).items())


def test_an_offloaded_learner_refuses_to_work(policy: Policy) -> None:
    learner = learner_of(policy)
    learner._memory.free()
    assert_refuses_to_work(learner)
    assert learner.onload() > 0
    assert update(learner, samples(learner.renderer)).num_tokens == 81
