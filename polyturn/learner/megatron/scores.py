"""Hidden states -> logprobs and entropies with the vocabulary split over ranks, a chunk of logits at a time.

As `polyturn.policy.logprobs`, of which this is the same maths: N tokens, C tokens of a chunk, H hidden size, W rows of the
vocabulary on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyturn.policy.fused import compiled, logit_gradient, scaled_logits
from polyturn.policy.logprobs import HowToScore, Scores


@dataclass(frozen=True)
class VocabHead:
    """This rank's part of the head and of the sampler's distribution.

    `first`: the token of the weight's first row; rows from `vocab_size` on are padding, which like the banned tokens has
    probability 0.
    """

    weight: Tensor  # [W, H]
    first: int
    vocab_size: int
    banned_ids: tuple[int, ...]
    temperature: float
    group: dist.ProcessGroup
    how: HowToScore

    def score(
        self, hidden: Tensor, targets: Tensor, *, with_entropy_gradient: bool = False
    ) -> Scores:
        """Score target tokens [N] from the states [N, H] before each; the same on every rank (collective).

        The gradient of `hidden` is this rank's part of a sum over ranks.
        """
        size = max(1, self.how.chunk_tokens or len(hidden))
        is_again = len(hidden) > size and torch.is_grad_enabled()
        run = self._chunk_again if is_again else self._chunk
        parts = [
            run(states, chosen)
            for states, chosen in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        entropy = torch.cat([part.entropy for part in parts])
        return Scores(
            torch.cat([part.logprobs for part in parts]),
            entropy if with_entropy_gradient else entropy.detach(),
        )

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Scores:
        logits = torch.nn.functional.linear(hidden, self.weight)
        scored = _SplitScore.apply(logits, targets - self.first, self)
        return Scores(*cast("tuple[Tensor, Tensor]", scored))

    def _chunk_again(self, hidden: Tensor, targets: Tensor) -> Scores:
        scored = checkpoint(
            self._chunk, hidden, targets, use_reentrant=False, preserve_rng_state=False
        )
        return cast("Scores", scored)

    @functools.cached_property
    def is_excluded(self) -> Tensor:
        """Which rows of the weight are banned or padding, [W]."""
        number = len(self.weight)
        rows = [token_id - self.first for token_id in self.banned_ids]
        rows += range(max(0, self.vocab_size - self.first), number)
        is_excluded = torch.zeros(number, dtype=torch.bool)
        is_excluded[[row for row in rows if 0 <= row < number]] = True
        return is_excluded.to(self.weight.device)

    def run(self, function: Callable[..., Tensor], *arguments: object) -> Tensor:
        """Call one of the functions below, fused by torch.compile if that is asked for."""
        chosen = compiled(function) if self.how.is_compiled else function
        return chosen(*arguments)


class _Context(Protocol):
    """What autograd hands to both passes."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    head: VocabHead

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _SplitScore(torch.autograd.Function):
    """Logits [C, W] -> logprobs of targets and entropies [C]; keeps the logits for the backward pass.

    Targets count from this rank's first row and may lie outside. Two reductions over ranks: of the largest scaled logit
    m, and of Z = sum exp(x - m), of sum (x - m) exp(x - m) and of x - m at the target. Then log p = x - m - log Z and
    H = log Z - sum (x - m) exp(x - m) / Z. Gradients are those of `polyturn.policy.logprobs`.
    """

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, targets: Tensor, head: VocabHead
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.head = head
        arguments = (logits, head.temperature, head.is_excluded)
        largest = head.run(_largest, *arguments)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=head.group)
        sums = head.run(_sums, *arguments, largest, targets)
        dist.all_reduce(sums, group=head.group)
        total, weighted, at_target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, targets, entropy, largest + log_total)
        return at_target - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the outputs by name)
        ctx: _Context, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits, targets, entropy, normaliser = ctx.saved_tensors
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(entropy)
        arguments = (logits, ctx.head.temperature, ctx.head.is_excluded)
        slopes = (logprob_grad, entropy_grad, entropy)
        return ctx.head.run(logit_gradient, *arguments, normaliser, targets, slopes), None, None


def _largest(logits: Tensor, temperature: float, is_excluded: Tensor) -> Tensor:
    """Of each row, [C]; finite on a rank with nothing but excluded rows."""
    scaled = scaled_logits(logits, temperature).masked_fill(is_excluded, -torch.inf)
    return scaled.amax(-1).clamp(min=torch.finfo(scaled.dtype).min)


def _sums(
    logits: Tensor, temperature: float, is_excluded: Tensor, largest: Tensor, targets: Tensor
) -> Tensor:
    """This rank's parts of Z, of sum (x - m) exp(x - m) and of x - m at the target, [3, C]."""
    shifted = scaled_logits(logits, temperature) - largest[:, None]
    weights = shifted.masked_fill(is_excluded, -torch.inf).exp()
    is_here = (targets >= 0) & (targets < logits.shape[1])
    place = torch.where(is_here, targets, 0)
    at_target = shifted.masked_fill(is_excluded, -torch.inf).gather(-1, place[:, None])[:, 0]
    # 0 log 0 is 0: an excluded token has weight 0, and its logit is finite
    return torch.stack(
        [weights.sum(-1), (weights * shifted).sum(-1), torch.where(is_here, at_target, 0.0)]
    )
