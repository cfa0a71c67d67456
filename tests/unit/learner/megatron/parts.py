"""A head that ranks share by rows of the vocabulary, and what each of them gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polyturn.learner.megatron.scores import VocabHead
from polyturn.policy.logprobs import HowToScore, Scores

VOCAB, WIDTH, NUMBER = 501, 16, 7
BANNED = (3, 498)
CASES = list(itertools.product([1.0, 0.6], [3, 1000], [False, True]))
"""Temperature, tokens of a chunk, whether the entropy has a gradient."""


def states() -> Tensor:
    return torch.randn(NUMBER, WIDTH, generator=torch.Generator().manual_seed(0))


def head() -> Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))


def targets() -> Tensor:
    """Of the first rank, of the last one, at borders between ranks."""
    return torch.tensor([0, 500, 249, 250, 251, 252, 499])


def loss(scores: Scores) -> Tensor:
    weights = torch.linspace(-1, 1, NUMBER)
    return (scores.logprobs * weights).sum() + (scores.entropy * weights.flip(0)).sum()


@dataclass(frozen=True)
class Part:
    """What one rank gets: scores are the same on all, gradients its own."""

    logprobs: Tensor
    entropy: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def scored(
    group: dist.ProcessGroup, temperature: float, chunk: int, *, with_entropy_gradient: bool
) -> Part:
    """Score with this rank's rows (collective)."""
    height = -(-VOCAB // group.size())
    padded = torch.cat([head(), torch.full((height * group.size() - VOCAB, WIDTH), 9.0)])
    own = padded.split(height)[group.rank()].clone().requires_grad_(True)
    hidden = states().requires_grad_(True)
    vocab_head = VocabHead(
        own, group.rank() * height, VOCAB, BANNED, temperature, group, HowToScore(chunk)
    )
    scores = vocab_head.score(hidden, targets(), with_entropy_gradient=with_entropy_gradient)
    loss(scores).backward()
    assert hidden.grad is not None
    assert own.grad is not None
    return Part(scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, own.grad)


def scored_all(group: dist.ProcessGroup) -> dict[tuple[float, int, bool], Part]:
    """Every case (collective)."""
    return {case: scored(group, case[0], case[1], with_entropy_gradient=case[2]) for case in CASES}
