"""Scores of tokens: the distribution's own numbers and gradients, whatever the chunk, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polyturn.policy.forward import token_distribution
from polyturn.policy.logprobs import HowToScore, Scores, _Score, score
from polyturn.policy.model import Policy
from tests.unit import tiny


def states(number: int, width: int = 64) -> Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(0))


def targets_of(number: int) -> Tensor:
    return torch.arange(number) * 7 % 250


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_the_targets_logprobs_and_the_entropy(
    policy: Policy, temperature: float
) -> None:
    hidden = states(2)
    distribution = token_distribution(policy, hidden, temperature)
    scores = score(policy, hidden, torch.tensor([7, 9]), temperature)
    assert torch.equal(scores.logprobs, torch.stack([distribution[0, 7], distribution[1, 9]]))
    probabilities = distribution.double().exp()
    entropy = -torch.where(probabilities > 0, probabilities * distribution, 0.0).sum(-1)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=0, atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    """Of logprobs and of entropies, at a temperature, with banned tokens (in float64)."""
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_(True)
    targets = torch.tensor([0, 4, 8])
    assert torch.autograd.gradcheck(lambda x: _Score.apply(x, targets, 0.7, [2, 5]), (logits,))


@pytest.mark.parametrize("number", [1, 5, 6, 12, 13])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_change_neither_scores_nor_gradients(
    policy: Policy, number: int, with_entropy: bool
) -> None:
    own = tiny.copy_of(policy)
    found: list[tuple[Scores, Tensor, Tensor]] = []
    for chunk in (None, 6):
        hidden = states(number).requires_grad_(True)
        own.model.zero_grad()
        scores = score(
            own,
            hidden,
            targets_of(number),
            0.8,
            how=HowToScore(chunk),
            with_entropy_gradient=with_entropy,
        )
        assert scores.entropy.requires_grad == with_entropy
        weights = torch.linspace(-1, 1, number + 1)[1:]
        (scores.logprobs @ weights + (scores.entropy @ weights if with_entropy else 0)).backward()
        assert hidden.grad is not None
        found.append((scores, hidden.grad, own.model.lm_head.weight.grad.clone()))
    (whole, *whole_grads), (chunked, *chunked_grads) = found
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked.entropy, whole.entropy, rtol=1e-6, atol=1e-6)
    for one, other in zip(chunked_grads, whole_grads, strict=True):
        assert (one - other).norm() / other.norm() < 1e-6


def test_no_tokens_have_no_scores(policy: Policy) -> None:
    scores = score(policy, states(0), targets_of(0), 1.0, how=HowToScore(4))
    assert scores.logprobs.shape == scores.entropy.shape == (0,)


def peak_bytes(run: Callable[[], None]) -> int:
    """By how much the tensors alive at one time exceed those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += cast("int", getattr(event, "nbytes")())  # noqa: B009  (stubs lack it)
            peak = max(peak, now)
    return peak


def test_memory_grows_with_the_chunk_and_not_with_the_tokens() -> None:
    """A vocabulary of 8192: rows of logits are 32 KiB, and 2048 tokens would have 64 MiB of them."""
    wide = tiny.qwen3(tiny.SMALL.model_copy(update={"vocab_size": 512}))
    wide.model.lm_head = torch.nn.Linear(64, 8192, bias=False)

    def step(number: int, chunk: int | None) -> Callable[[], None]:
        hidden = states(number).requires_grad_(True)
        wide.model.lm_head.weight.grad = torch.zeros(8192, 64)

        def run() -> None:
            scores = score(wide, hidden, targets_of(number), 1.0, how=HowToScore(chunk))
            scores.logprobs.sum().backward()

        return run

    rows = 8192 * 4
    weights = 8192 * 64 * 4
    whole = peak_bytes(step(2048, None))
    short, long = peak_bytes(step(512, 64)), peak_bytes(step(2048, 64))
    assert whole > 2 * 2048 * rows
    assert long < 5 * 64 * rows + 3 * weights + 2048 * 64 * 4 * 4
    assert long - short < 4 * (2048 - 512) * 64 * 4
