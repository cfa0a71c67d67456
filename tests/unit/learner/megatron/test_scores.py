"""Logprobs over a vocabulary that ranks share: those of one rank, with gradients, in chunks, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polyturn.learner.megatron.scores import VocabHead, _SplitScore
from polyturn.policy.logprobs import EAGER, HowToScore, Scores, _Score
from tests.unit.learner.megatron import parts
from tests.unit.learner.megatron.cases import OnRank

VOCAB, WIDTH, NUMBER = parts.VOCAB, parts.WIDTH, parts.NUMBER


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield cast("dist.ProcessGroup", dist.group.WORLD)
    if is_mine:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Wanted:
    """What `polyturn.policy.logprobs` gives for the whole vocabulary."""

    scores: Scores
    hidden_grad: Tensor
    weight_grad: Tensor


def wanted(temperature: float, *, with_entropy_gradient: bool) -> Wanted:
    hidden, weight = parts.states().requires_grad_(True), parts.head().requires_grad_(True)
    logits = hidden @ weight.T
    logprobs, entropy = cast(
        "tuple[Tensor, Tensor]",
        _Score.apply(logits, parts.targets(), temperature, list(parts.BANNED)),
    )
    parts.loss(Scores(logprobs, entropy if with_entropy_gradient else entropy.detach())).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Wanted(Scores(logprobs.detach(), entropy.detach()), hidden.grad, weight.grad)


@pytest.mark.parametrize("with_entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [3, NUMBER, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_one_rank_gives_the_scores_and_gradients_of_the_whole_vocabulary(
    group: dist.ProcessGroup, temperature: float, chunk: int, with_entropy_gradient: bool
) -> None:
    found = parts.scored(group, temperature, chunk, with_entropy_gradient=with_entropy_gradient)
    assert_equal([found], wanted(temperature, with_entropy_gradient=with_entropy_gradient))


def test_two_ranks_do_too(two: list[OnRank]) -> None:
    """501 rows, padded to 502: the last rank has padding, and each has a banned token."""
    for key in parts.CASES:
        temperature, _, with_entropy_gradient = key
        assert_equal(
            [rank.parts[key] for rank in two],
            wanted(temperature, with_entropy_gradient=with_entropy_gradient),
        )


def assert_equal(found: list[parts.Part], expected: Wanted) -> None:
    """Scores are on every rank; gradients of the states are summed, those of the head stand one after the other."""
    for part in found:
        torch.testing.assert_close(part.logprobs, expected.scores.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(part.entropy, expected.scores.entropy, rtol=0, atol=1e-5)
    hidden_grad = sum(part.hidden_grad for part in found)
    torch.testing.assert_close(hidden_grad, expected.hidden_grad, rtol=1e-4, atol=1e-5)
    weight_grad = torch.cat([part.weight_grad for part in found])
    torch.testing.assert_close(weight_grad[:VOCAB], expected.weight_grad, rtol=1e-4, atol=1e-5)
    assert not weight_grad[VOCAB:].any(), "padding is never trained"


def test_gradients_are_those_of_finite_differences(group: dist.ProcessGroup) -> None:
    """Of logprobs and of entropies, with banned tokens and padding (in float64)."""
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    head = VocabHead(torch.zeros(9, 1), 0, 8, (2, 5), 0.7, group, EAGER)
    targets = torch.tensor([0, 4, 7])
    assert torch.autograd.gradcheck(
        lambda x: _SplitScore.apply(x, targets, head), (logits.requires_grad_(True),)
    )


def test_a_rank_whose_tokens_are_all_banned_gives_no_nan(group: dist.ProcessGroup) -> None:
    """By hand: one other token is left, with probability 1 and entropy 0."""
    head = VocabHead(torch.ones(4, 2), 0, 4, (0, 1, 3), 1.0, group, EAGER)
    scores = head.score(torch.ones(1, 2), torch.tensor([2]))
    assert scores.logprobs.tolist() == [0.0]
    assert scores.entropy.tolist() == [0.0]


def test_entropy_has_a_gradient_only_on_request(group: dist.ProcessGroup) -> None:
    head = VocabHead(parts.head(), 0, VOCAB, parts.BANNED, 1.0, group, EAGER)
    for wants in (False, True):
        scores = head.score(
            parts.states().requires_grad_(True),
            parts.targets(),
            with_entropy_gradient=wants,
        )
        assert scores.entropy.requires_grad == wants


def test_memory_grows_with_the_chunk_and_not_with_the_tokens(group: dist.ProcessGroup) -> None:
    """A vocabulary of 8192: rows of logits are 32 KiB, and 2048 tokens would have 64 MiB of them."""
    rows = 8192 * 4

    def peak(number: int, chunk: int) -> int:
        weight = torch.zeros(8192, WIDTH, requires_grad=True)
        weight.grad = torch.zeros_like(weight)
        head = VocabHead(weight, 0, 8192, (), 1.0, group, HowToScore(chunk))
        hidden = torch.randn(number, WIDTH, requires_grad=True)
        targets = torch.arange(number)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            head.score(hidden, targets).logprobs.sum().backward()
        now = most = 0
        for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += cast("int", event.nbytes())
                most = max(most, now)
        return most

    assert peak(2048, 2048) > 2 * 2048 * rows
    assert peak(2048, 64) < 8 * 64 * rows + 4 * 8192 * WIDTH * 4 + 2048 * WIDTH * 16
