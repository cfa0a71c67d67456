"""The same batch on FSDP and on Megatron-Core, one process and two: one table of losses, gradients and weights.

Gradients that are 0 but for rounding (of key biases: a softmax does not change with them) are noise of about 1e-9, which
AdamW's usual eps of 1e-8 makes steps of: FSDP on two ranks and on one differ there just as much. The largest difference
of any weight is therefore told with eps 1e-6, and with the usual one the root mean square over all weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn.world import ONE
from tests.unit import ranks, tiny
from tests.unit.learner.megatron_scenarios import (
    LR,
    MEGATRON,
    ON_DATA_RANKS,
    ON_TENSOR_RANKS,
    ON_TWO,
    TWO_KV_HEADS,
    WITHOUT_ADAPTERS,
    Everything,
    Run,
    learner_of,
    run_of,
)
from tests.unit.learner.scenarios import (
    DIRECTORY,
    FSDP,
    SCENARIOS,
    Outcome,
    Tensors,
    continued,
    outcome_of,
    place,
    refusal,
    samples,
    third_step,
    weights_of,
)

FLOAT32 = [name for name in WITHOUT_ADAPTERS if name != "bfloat16"]
LAYOUTS = ("Megatron TP1", *ON_TWO)
"""Compared with FSDP in one process."""


@dataclass(frozen=True)
class Found:
    """What one process and both ranks of two brought back; `output` is what rank 0 printed."""

    one: Run
    runs: dict[str, Run]
    two: list[Everything]
    output: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All of it once; the ranks read the checkpoint of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(tmp_path_factory.mktemp("states")))
        runs = {"Megatron TP1": run_of(MEGATRON, ONE)}
        continued(ONE, kind=MEGATRON)
        two = ranks.run(
            "tests.unit.learner.megatron_scenarios:on_two",
            tmp_path_factory.mktemp("two"),
            timeout_s=300,
        )
        for rank in two:
            assert isinstance(rank.outcome, Everything), f"{rank.outcome!r}\n{rank.output}"
        outcomes = [rank.outcome for rank in two if isinstance(rank.outcome, Everything)]
        runs |= outcomes[0].runs
        yield Found(run_of(FSDP, ONE), runs, outcomes, two[0].output)


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """The scenarios on FSDP in one process."""
    return {name: outcome_of(SCENARIOS[name], ONE) for name in WITHOUT_ADAPTERS}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


@dataclass(frozen=True)
class Row:
    """A line of the table: how far a run is from FSDP in one process; lengths of weights are in learning rates."""

    loss: float
    grad_norm: float
    gradient: float  # of the worst tensor
    mean_weight: float
    largest_weight: float


def row(run: Run, one: Run) -> Row:
    """Compare two runs, every tensor."""
    mean = (flat(run.weights) - flat(one.weights)).square().mean().sqrt()
    largest = [
        (run.weights_with_large_eps[name] - value).abs().max()
        for name, value in one.weights_with_large_eps.items()
    ]
    return Row(
        abs(run.loss - one.loss) / abs(one.loss),
        abs(run.grad_norm - one.grad_norm) / one.grad_norm,
        max(error(run.gradients[name], value) for name, value in one.gradients.items()),
        float(mean) / LR,
        float(max(largest)) / LR,
    )


def test_one_table_of_all_learners(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pictures a sample, DeepStack, a trained tower, replies of 3 to 61 tokens; five optimizer steps."""
    assert len(found.one.gradients) == len(dict(tiny.qwen3(TWO_KV_HEADS).model.named_parameters()))
    assert min(float(gradient.norm()) for gradient in found.one.gradients.values()) > 0
    lines = [
        f"FSDP x1: loss {found.one.loss:.6f}, gradient norm {found.one.grad_norm:.6f}; away from it:",
        f"{'':18}{'loss':>10}{'norm':>10}{'gradients':>11}{'weights':>10}{'largest':>10}",
    ]
    rows = {name: row(found.runs[name], found.one) for name in LAYOUTS}
    for name, one in rows.items():
        numbers = (one.loss, one.grad_norm, one.gradient, one.mean_weight, one.largest_weight)
        lines.append(f"{name:18}" + "".join(f"{number:10.1e}" for number in numbers))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    for name, one in rows.items():
        assert max(one.loss, one.grad_norm, one.gradient) < 1e-5, name
        assert max(one.mean_weight, one.largest_weight) < 1e-2, name
    for run in found.runs.values():
        assert set(found.one.gradients) <= set(run.gradients)
        assert run.weights.keys() == found.one.weights.keys()


def test_a_mistake_of_one_part_in_a_thousand_would_show(found: Found) -> None:
    worse = {name: gradient * 1.001 for name, gradient in found.one.gradients.items()}
    changed = Run(found.one.loss, found.one.grad_norm, worse, found.one.weights, found.one.weights)
    assert row(changed, found.one).gradient > 9e-4


def assert_same(outcome: Outcome, wanted: Outcome) -> None:
    """First update, weights after three of them, logprobs."""
    first, same = wanted.stats[0], outcome.stats[0]
    assert (same.num_tokens, same.lr) == (first.num_tokens, first.lr)
    assert same.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert same.loss_metrics.keys() == first.loss_metrics.keys()
    for metric, value in first.loss_metrics.items():
        assert same.loss_metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    for name, gradient in wanted.gradients.items():
        assert error(outcome.gradients[name], gradient) < 1e-5, name
    moved = flat(wanted.weights)
    assert float((flat(outcome.weights) - moved).norm()) < 0.01 * LR * len(moved) ** 0.5
    for own, other in zip(outcome.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    assert outcome.gap == pytest.approx(wanted.gap, abs=1e-5)


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@pytest.mark.parametrize("name", FLOAT32)
def test_one_process_does_what_fsdp_does(alone: dict[str, Outcome], name: str) -> None:
    assert_same(outcome_of(SCENARIOS[name], ONE, kind=MEGATRON), alone[name])


@pytest.mark.parametrize("name", [name for name in ON_TENSOR_RANKS if name != "bfloat16"])
def test_ranks_that_share_weights_and_tokens_do_what_fsdp_does(
    found: Found, alone: dict[str, Outcome], name: str
) -> None:
    assert_same(found.two[0].shared[name], alone[name])


@pytest.mark.parametrize("name", ON_DATA_RANKS)
def test_ranks_that_split_the_samples_do_what_fsdp_does(
    found: Found, alone: dict[str, Outcome], name: str
) -> None:
    assert_same(found.two[0].split[name], alone[name])


def test_an_update_without_pictures_leaves_a_trained_tower_alone() -> None:
    """Its moments and its decay would move it, had it a gradient of zeros."""
    learner = learner_of(tiny.qwen3(), weight_decay=0.1)
    chosen = samples(learner.renderer)
    learner.update(chosen, lr_scale=1.0, is_on_policy=True)
    before = weights_of(learner)
    learner.update(chosen[2:3], lr_scale=1.0, is_on_policy=True)
    after = weights_of(learner)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    assert [part.num_steps for part in learner.stepper.parts.values()] == [2, 1]


def test_bfloat16_is_near_float32(found: Found, alone: dict[str, Outcome]) -> None:
    """Steps below bfloat16's resolution are not lost: main weights are float32."""
    exact = alone["trained tower"]
    alone_too = outcome_of(SCENARIOS["bfloat16"], ONE, kind=MEGATRON)
    for outcome in (alone_too, found.two[0].shared["bfloat16"]):
        one, two = flat(outcome.gradients), flat(exact.gradients | _head(exact.gradients))
        assert one @ two / (one.norm() * two.norm()) > 0.999
        assert outcome.stats[0].grad_norm == pytest.approx(exact.stats[0].grad_norm, rel=0.02)
        assert {tensor.dtype for tensor in outcome.gradients.values()} == {torch.float32}
        assert {tensor.dtype for tensor in outcome.weights.values()} == {torch.bfloat16}


def _head(gradients: Tensors) -> Tensors:
    """A tied head is told apart from the embedding by one of the two."""
    return {"lm_head.weight": gradients["model.language_model.embed_tokens.weight"]}


def test_all_ranks_have_the_same(found: Found) -> None:
    first, second = found.two
    for mine, others in ((first.shared, second.shared), (first.split, second.split)):
        for name, outcome in mine.items():
            other = others[name]
            assert outcome.stats == other.stats
            assert all(torch.equal(value, other.weights[n]) for n, value in outcome.weights.items())
            assert all(map(np.array_equal, outcome.logprobs, other.logprobs))


def test_what_is_not_finite_stops_all_ranks_and_changes_nothing(found: Found) -> None:
    for outcome in (refusal(ONE, MEGATRON), *found.two[0].refusals, *found.two[1].refusals):
        assert outcome.message.startswith("loss nan, gradient norm nan; not finite: loss, pg_loss")
        for name, value in outcome.weights_before.items():
            assert torch.equal(outcome.weights_after[name], value), name
        assert outcome.gradients == {}
        assert np.isfinite(outcome.next_loss)


@pytest.mark.parametrize("layout", ["tp", "dp"])
def test_a_continued_run_is_the_same_to_the_byte(found: Found, layout: str) -> None:
    """From what was saved at once, and from a snapshot that was written after another update."""
    result = found.two[0].continued[layout]
    for again in (result.resumed, result.snapshot):
        assert all(torch.equal(value, again[name]) for name, value in result.steady.items())


@pytest.mark.parametrize("layout", ["tp", "dp"])
def test_any_layout_continues_any_others_checkpoint_and_says_so(
    found: Found, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From one process to two ranks and back."""
    result = found.two[0].continued[layout]
    there = third_step(place(2, layout), ONE, MEGATRON)
    before = flat(dict(tiny.qwen3(TWO_KV_HEADS).model.state_dict()))
    moved = (flat(result.steady) - before).norm()
    assert (flat(result.from_one) - flat(result.steady)).norm() < 0.01 * moved
    assert (flat(there) - flat(result.steady)).norm() < 0.01 * moved
    told = {"tp": "1 x 2", "dp": "2 x 1"}[layout]
    assert f"was written by {told} ranks and is continued by 1 x 1" in caplog.text
    assert f"was written by 1 x 1 ranks and is continued by {told}" in found.output


@pytest.mark.full
def test_two_pairs_of_ranks_do_what_fsdp_does(tmp_path: Path) -> None:
    (first, *_) = ranks.run(
        "tests.unit.learner.megatron_scenarios:on_four", tmp_path, size=4, timeout_s=600
    )
    assert isinstance(first.outcome, Run), first.output
    one = row(first.outcome, run_of(FSDP, ONE))
    assert max(one.loss, one.grad_norm, one.gradient) < 1e-5
    assert max(one.mean_weight, one.largest_weight) < 1e-2
