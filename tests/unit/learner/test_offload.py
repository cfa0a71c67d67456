"""Memory that moves to the host and back under tensors that stay the same objects."""

from __future__ import annotations

import pytest
import torch

from polyturn.learner.offload import HostCopy
from polyturn.model import Policy
from polyturn.render import Renderer
from tests.unit.learner.scenarios import learner_of, samples, update


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


def test_an_offloaded_learner_refuses_to_work(policy: Policy, renderer: Renderer) -> None:
    """Reading memory that is not there would give anything."""
    learner = learner_of(policy)
    learner._host.take(learner.parameters.values())
    chosen = samples(renderer)
    for use in (
        lambda: update(learner, chosen),
        lambda: learner.logprobs(chosen),
        learner.export_weights,
        learner.snapshot,
    ):
        with pytest.raises(AssertionError, match=r"onload\(\) first"):
            use()
    assert learner.onload() > 0
    assert update(learner, chosen).num_tokens == 81
