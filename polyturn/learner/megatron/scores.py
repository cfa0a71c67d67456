"""Hidden states -> logprobs and entropies with the vocabulary split over ranks, a chunk of logits at a time.

As `polyturn.logprobs`, of which this is the same maths: N tokens, C tokens of a chunk, H hidden size, W rows of the
vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyturn.logprobs import LOWEST, Scores


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

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        chunk_tokens: int,
        with_entropy_gradient: bool = False,
    ) -> Scores:
        """Score target tokens [N] from the states [N, H] before each; the same on every rank (collective).

        At most `chunk_tokens` rows of logits exist at a time; with more than one chunk the backward pass computes each
        chunk's anew. The gradient of `hidden` is this rank's part of a sum over ranks.
        """
        is_again = len(hidden) > chunk_tokens and torch.is_grad_enabled()
        run = self._chunk_again if is_again else self._chunk
        parts = [
            run(states, chosen)
            for states, chosen in zip(
                hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True
            )
        ]
        entropy = torch.cat([part.entropy for part in parts])
        return Scores(
            torch.cat([part.logprobs for part in parts]),
            entropy if with_entropy_gradient else entropy.detach(),
        )

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Scores:
        logits = torch.nn.functional.linear(hidden, self.weight).float()
        scored = _SplitScore.apply(logits, targets - self.first, self)
        return Scores(*cast("tuple[Tensor, Tensor]", scored))

    def _chunk_again(self, hidden: Tensor, targets: Tensor) -> Scores:
        scored = checkpoint(
            self._chunk, hidden, targets, use_reentrant=False, preserve_rng_state=False
        )
        return cast("Scores", scored)

    def excluded(self) -> Tensor:
        """Rows of the weight that are banned or padding."""
        rows = [token_id - self.first for token_id in self.banned_ids]
        rows += range(max(0, self.vocab_size - self.first), len(self.weight))
        own = [row for row in rows if 0 <= row < len(self.weight)]
        return torch.tensor(own, dtype=torch.long, device=self.weight.device)


class _Context(Protocol):
    """What autograd hands to both passes."""

    saved_tensors: tuple[Tensor, Tensor, Tensor]
    temperature: float

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _SplitScore(torch.autograd.Function):
    """Logits [C, W] -> logprobs of targets and entropies [C]; keeps one [C, W] tensor for the backward pass.

    Targets count from this rank's first row and may lie outside. Two reductions: of the largest logit m, and of
    Z = sum exp(x - m), of sum (x - m) exp(x - m) and of x - m at the target. Then log p = x - m - log Z and
    H = log Z - sum (x - m) exp(x - m) / Z. Gradients are those of `polyturn.logprobs`.
    """

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, targets: Tensor, head: VocabHead
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scaled = logits / head.temperature
        scaled[:, head.excluded()] = -torch.inf
        largest = scaled.amax(-1).clamp(min=torch.finfo(scaled.dtype).min)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=head.group)
        shifted = scaled - largest[:, None]
        is_here = (targets >= 0) & (targets < logits.shape[1])
        place = torch.where(is_here, targets, 0)[:, None]
        exponentials = shifted.exp()
        sums = torch.stack(
            [
                exponentials.sum(-1),
                (exponentials * shifted.clamp(min=LOWEST)).sum(-1),
                torch.where(is_here, shifted.gather(-1, place)[:, 0], 0.0),
            ]
        )
        dist.all_reduce(sums, group=head.group)
        total, weighted, at_target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(
            shifted - log_total[:, None], torch.where(is_here, targets, -1), entropy
        )
        ctx.temperature = head.temperature
        return at_target - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the outputs by name)
        ctx: _Context, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        distribution, targets, entropy = ctx.saved_tensors
        probabilities = distribution.exp()
        gradient = torch.zeros_like(distribution)
        if entropy_grad is not None:
            slope = distribution.clamp(min=LOWEST) + entropy[:, None]
            gradient -= probabilities * slope * entropy_grad[:, None]
        if logprob_grad is not None:
            gradient -= probabilities.mul_(logprob_grad[:, None])
            place = targets.clamp(min=0)[:, None]
            at_target = torch.where(targets >= 0, logprob_grad, 0.0)[:, None]
            # One place a row; scatter_add_ has no deterministic form on a GPU.
            gradient.scatter_(-1, place, gradient.gather(-1, place) + at_target)
        return gradient.div_(ctx.temperature), None, None
