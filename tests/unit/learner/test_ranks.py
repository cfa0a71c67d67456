"""Two ranks over gloo give what one process gives: losses, every gradient, weights, logprobs, states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from polyturn.world import ONE
from tests.unit import ranks, tiny
from tests.unit.learner.scenarios import (
    DIRECTORY,
    SCENARIOS,
    Everything,
    Outcome,
    Tensors,
    everything,
    place,
    third_step,
)

FLOAT32 = [name for name in SCENARIOS if name != "bfloat16"]


@dataclass(frozen=True)
class Found:
    """What one process and two ranks brought back; `output` is what the ranks printed."""

    one: Everything
    two: list[Everything]
    output: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All scenarios once here and once on two ranks, which then read this process's checkpoint."""
    states = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(states))
        one = everything(ONE)
        two = ranks.run("tests.unit.learner.scenarios:everything", tmp_path_factory.mktemp("two"))
        for rank in two:
            assert isinstance(rank.outcome, Everything), f"{rank.outcome!r}\n{rank.output}"
        outcomes = [rank.outcome for rank in two if isinstance(rank.outcome, Everything)]
        yield Found(one, outcomes, two[0].output)


def errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Norm of the difference over the norm, by tensor."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name] - value).norm() / value.norm().clamp(min=1e-9))
        for name, value in wanted.items()
    }


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@pytest.mark.parametrize("name", FLOAT32)
def test_losses_and_every_gradient_are_those_of_one_process(found: Found, name: str) -> None:
    one, two = found.one.outcomes[name], found.two[0].outcomes[name]
    first, same = one.stats[0], two.stats[0]
    assert same.num_tokens == first.num_tokens
    assert same.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert same.loss_metrics.keys() == first.loss_metrics.keys()
    for metric, value in first.loss_metrics.items():
        assert same.loss_metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    assert max(errors(two.gradients, one.gradients).values()) < 1e-5


@pytest.mark.parametrize("name", FLOAT32)
def test_weights_and_logprobs_after_three_updates_are_those_of_one_process(
    found: Found, name: str
) -> None:
    """Adam scales up the rounding of gradients that are nearly 0, so that weights are compared by their way."""
    one, two = found.one.outcomes[name], found.two[0].outcomes[name]
    before = getattr(tiny, SCENARIOS[name].policy)().model.state_dict()
    moved = (flat(one.weights) - flat(before)).norm()
    assert moved > 0
    assert (flat(two.weights) - flat(one.weights)).norm() < 0.01 * moved
    for own, other in zip(two.logprobs, one.logprobs, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    assert two.gap == pytest.approx(one.gap, abs=1e-5)
    assert two.stats[2].loss_metrics["loss"] == pytest.approx(
        one.stats[2].loss_metrics["loss"], abs=1e-4
    )


def test_bfloat16_is_near_float32_whatever_the_number_of_ranks(found: Found) -> None:
    """Main weights and gradients are float32; only the computation is rounded."""
    exact = found.one.outcomes["trained tower"]
    for everything_ in (found.one, found.two[0]):
        rounded: Outcome = everything_.outcomes["bfloat16"]
        assert {tensor.dtype for tensor in rounded.weights.values()} == {torch.float32}
        assert {tensor.dtype for tensor in rounded.gradients.values()} == {torch.float32}
        one, two = flat(rounded.gradients), flat(exact.gradients)
        assert one @ two / (one.norm() * two.norm()) > 0.999
        assert rounded.stats[0].grad_norm == pytest.approx(exact.stats[0].grad_norm, rel=0.02)
        assert 0 < max(errors(rounded.gradients, exact.gradients).values()) < 0.2


def test_all_ranks_have_the_same(found: Found) -> None:
    first, second = found.two
    for name, outcome in first.outcomes.items():
        other = second.outcomes[name]
        assert outcome.stats == other.stats
        assert all(torch.equal(value, other.weights[n]) for n, value in outcome.weights.items())
        assert all(map(np.array_equal, outcome.logprobs, other.logprobs))


def test_a_frozen_tower_keeps_its_weights_on_every_rank(found: Found) -> None:
    before = tiny.qwen3().model.state_dict()
    for rank in found.two:
        weights = rank.outcomes["frozen tower"].weights
        changed = {name for name, value in weights.items() if not torch.equal(value, before[name])}
        assert changed
        assert not any("visual" in name for name in changed)


def test_only_adapted_layers_change(found: Found) -> None:
    before = tiny.qwen3().model.state_dict()
    weights = found.two[0].outcomes["adapters in both towers"].weights
    changed = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj", "qkv"}


def test_what_is_not_finite_stops_all_ranks_and_changes_nothing(found: Found) -> None:
    """One rank's sample has no number for an advantage; the other rank's are good."""
    for outcome in (found.one, *found.two):
        refusal = outcome.refusal
        assert refusal.message.startswith("loss nan, gradient norm nan; not finite: loss, pg_loss")
        assert errors(refusal.weights_after, refusal.weights_before) == pytest.approx(
            dict.fromkeys(refusal.weights_before, 0.0), abs=0.0
        )
        assert refusal.gradients == {}
        assert refusal.next_loss == pytest.approx(found.one.refusal.next_loss, rel=1e-5)


@pytest.mark.parametrize("where", ["one process", "two ranks"])
def test_a_continued_run_is_the_same_to_the_byte(found: Found, where: str) -> None:
    """From what was saved at once, and from a snapshot that was written after another update."""
    result = (found.one if where == "one process" else found.two[0]).continued
    for again in (result.resumed, result.snapshot):
        assert all(torch.equal(value, again[name]) for name, value in result.steady.items())


def test_two_ranks_continue_what_one_process_saved_and_say_so(found: Found) -> None:
    one, two = found.one.continued, found.two[0].continued
    moved = (flat(one.steady) - flat(tiny.qwen3().model.state_dict())).norm()
    assert (flat(two.from_one) - flat(one.steady)).norm() < 0.01 * moved
    assert "was written by 1 ranks and is continued by 2" in found.output


def test_one_process_continues_what_two_ranks_saved_and_says_so(
    found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    steady = found.two[0].continued.steady
    again = third_step(place(2, "own"), ONE)
    moved = (flat(steady) - flat(tiny.qwen3().model.state_dict())).norm()
    assert (flat(again) - flat(steady)).norm() < 0.01 * moved
    assert "was written by 2 ranks and is continued by 1" in caplog.text
