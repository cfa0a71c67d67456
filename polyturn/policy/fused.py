"""torch.compile for what a GPU would run as many small kernels: decoder layers, vision blocks, what follows the head.

The eager paths stay the reference: the compiled ones equal them but for rounding. Shapes: C tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

# Graphs of one function that differ in what is not a size: gradient on or off, deterministic mode, dtype.
torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)


_Function = TypeVar("_Function", bound=Callable[..., object])


def opaque(function: _Function) -> _Function:
    """Let compiled code call `function` as it is; the graph ends before it and a new one begins behind it."""
    return cast("_Function", torch.compiler.disable(function))


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each module, in place; equal ones share their graphs, and sizes stay variable."""
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=True)


def compile_vision_blocks(blocks: Iterable[nn.Module]) -> None:
    """The same for blocks of a vision tower, around their attention.

    That one goes through the pictures one by one: compiled, each number of pictures would be a graph of its own.
    """
    for block in blocks:
        attention = cast("nn.Module", block.attn)
        attention.forward = opaque(attention.forward)
        compile_modules([block])


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with its small kernels fused, for any sizes."""
    return torch.compile(function, dynamic=True)


def fused_scores(
    logits: Tensor, targets: Tensor, temperature: float, banned: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits [C, V] of any float type -> logprobs of targets and entropies, both [C] float32.

    One pass over the logits forward and one backward; they are kept as they are for the backward pass.
    """
    is_banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    is_banned[banned] = True
    return cast("tuple[Tensor, Tensor]", _FusedScore.apply(logits, targets, temperature, is_banned))


class _Context(Protocol):
    """What `_FusedScore` keeps between its passes."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    temperature: float

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _FusedScore(torch.autograd.Function):
    """The same numbers as `polyturn.policy.logprobs._Score`, from the log of the normalising constant, [C]."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, targets: Tensor, temperature: float, is_banned: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        statistics = cast("_Statistics", compiled(cast("Callable[..., Tensor]", _statistics)))
        logprobs, entropy, normaliser = statistics(logits, targets, temperature, is_banned)
        ctx.save_for_backward(logits, targets, is_banned, entropy, normaliser)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the outputs by name)
        ctx: _Context, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits, targets, is_banned, entropy, normaliser = ctx.saved_tensors
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(entropy)
        slopes = (logprob_grad, entropy_grad, entropy)
        gradient = compiled(logit_gradient)(
            logits, ctx.temperature, is_banned, normaliser, targets, slopes
        )
        return gradient, None, None, None


class _Statistics(Protocol):
    def __call__(
        self, logits: Tensor, targets: Tensor, temperature: float, is_banned: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, is_banned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = scaled_logits(logits, temperature)
    allowed = scaled.masked_fill(is_banned, -torch.inf)
    highest = allowed.amax(-1)
    weights = (allowed - highest[:, None]).exp()
    total = weights.sum(-1)
    normaliser = highest + total.log()
    # 0 log 0 is 0: a banned token has weight 0, and its logit is finite
    entropy = normaliser - (weights * scaled).sum(-1) / total
    logprobs = allowed.gather(-1, targets[:, None])[:, 0] - normaliser
    return logprobs, entropy, normaliser


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """At the sampler's temperature, in float32 or finer."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def logit_gradient(
    logits: Tensor,
    temperature: float,
    is_excluded: Tensor,
    normaliser: Tensor,
    targets: Tensor,
    slopes: tuple[Tensor, Tensor | None, Tensor],
) -> Tensor:
    """Of the logits, [C, V]; `slopes`: of the loss by logprob and by entropy, and the entropy.

    Targets may lie outside of the V rows, where these are a part of the vocabulary.
    """
    logprob_grad, entropy_grad, entropy = slopes
    logarithms = scaled_logits(logits, temperature) - normaliser[:, None]
    probabilities = logarithms.exp().masked_fill(is_excluded, 0.0)
    slope = logprob_grad[:, None]
    if entropy_grad is not None:
        slope = slope + entropy_grad[:, None] * (logarithms + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = torch.where(is_target, logprob_grad[:, None], 0.0) - probabilities * slope
    return (gradient / temperature).to(logits.dtype)
