"""Hidden states -> logprobs of given tokens with the entropies there, a chunk of logits at a time.

Shapes: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyturn.policy.fused import fused_scores
from polyturn.policy.model import Policy

LOWEST = -1e4  # in place of the log of a banned token's probability 0, so that 0 log 0 is 0


@dataclass(frozen=True)
class Scores:
    """Logprob of each selected token and entropy of its distribution, both [N] float32."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class HowToScore:
    """What changes time and memory, not the numbers.

    At most `chunk_tokens` rows of logits exist at a time (None: all at once): more than one chunk means that the
    backward pass computes each chunk's logits anew. `is_compiled`: what follows the head is fused by torch.compile.
    """

    chunk_tokens: int | None = None
    is_compiled: bool = False


EAGER = HowToScore()


def score(
    policy: Policy,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    with_entropy_gradient: bool = False,
    how: HowToScore = EAGER,
) -> Scores:
    """Score target tokens; hidden [N, H] are the states *before* each target, targets [N].

    Temperature and banned tokens are the sampler's. The entropy carries a gradient only on request.
    """
    size = how.chunk_tokens or len(hidden)
    is_again = len(hidden) > size and torch.is_grad_enabled()
    head = _Head(policy, temperature, how.is_compiled)
    run = head.scores_again if is_again else head.scores
    parts = [
        run(states, chosen)
        for states, chosen in zip(
            hidden.split(max(1, size)), targets.split(max(1, size)), strict=True
        )
    ]
    entropy = torch.cat([part.entropy for part in parts])
    return Scores(
        torch.cat([part.logprobs for part in parts]),
        entropy if with_entropy_gradient else entropy.detach(),
    )


@dataclass(frozen=True)
class _Head:
    """The policy's head with the sampler's distribution on top."""

    policy: Policy
    temperature: float
    is_compiled: bool

    def scores(self, hidden: Tensor, targets: Tensor) -> Scores:
        logits = self.policy.model.lm_head(hidden)
        banned = list(self.policy.family.banned_ids)
        if self.is_compiled:
            scored = fused_scores(logits, targets, self.temperature, banned)
        else:
            scored = _Score.apply(logits.float(), targets, self.temperature, banned)
        return Scores(*cast("tuple[Tensor, Tensor]", scored))

    def scores_again(self, hidden: Tensor, targets: Tensor) -> Scores:
        """The same; the backward pass computes it a second time instead of keeping it."""
        scored = checkpoint(
            self.scores, hidden, targets, use_reentrant=False, preserve_rng_state=False
        )
        return cast("Scores", scored)


class _Context(Protocol):
    """What `_Score` keeps between its passes."""

    saved_tensors: tuple[Tensor, Tensor, Tensor]
    temperature: float

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Score(torch.autograd.Function):
    """Logits [C, V] -> logprobs of targets and entropies, both [C]; keeps one [C, V] tensor for the backward pass.

    With p the distribution at temperature t without the banned tokens and H its entropy,
    d logprob / d logit_j = (1[j = target] - p_j) / t and d H / d logit_j = -p_j (log p_j + H) / t.
    """

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, targets: Tensor, temperature: float, banned: list[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scaled = logits / temperature
        scaled[:, banned] = -torch.inf
        distribution = scaled.log_softmax(-1)
        entropy = -(distribution.exp() * distribution.clamp(min=LOWEST)).sum(-1)
        ctx.save_for_backward(distribution, targets, entropy)
        ctx.temperature = temperature
        return distribution.gather(-1, targets[:, None])[:, 0], entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the outputs by name)
        ctx: _Context, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        distribution, targets, entropy = ctx.saved_tensors
        probabilities = distribution.exp()
        gradient = torch.zeros_like(distribution)
        if entropy_grad is not None:
            slope = distribution.clamp(min=LOWEST) + entropy[:, None]
            gradient -= probabilities * slope * entropy_grad[:, None]
        if logprob_grad is not None:
            gradient -= probabilities.mul_(logprob_grad[:, None])
            place = targets[:, None]
            # One place a row; scatter_add_ has no deterministic form on a GPU.
            gradient.scatter_(-1, place, gradient.gather(-1, place) + logprob_grad[:, None])
        return gradient.div_(ctx.temperature), None, None, None
