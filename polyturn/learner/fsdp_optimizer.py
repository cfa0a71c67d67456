"""AdamW on a policy's own modules, whole in one process or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyturn.learner import sharding
from polyturn.learner.sharding import whole
from polyturn.params import LearnerParams


def adamw(
    parameters: Sequence[nn.Parameter], params: LearnerParams, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with decay of every weight, norms and biases too."""
    return torch.optim.AdamW(
        parameters,
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
        weight_decay=params.weight_decay,
        fused=True if device.type == "cuda" else None,
    )


@dataclass(frozen=True)
class FsdpOptimizer:
    """Gradients and steps of `inner`; FSDP2's modules lie under `root`, None: nothing is sharded."""

    inner: torch.optim.AdamW
    root: sharding.Root | None
    max_norm: float

    def zero_gradients(self) -> None:
        """Drop all gradients."""
        self.inner.zero_grad(set_to_none=True)

    def expect_more(self, has_more: bool) -> None:
        """Say whether further micro-batches of the same update follow the next backward pass."""
        if self.root is not None:
            sharding.expect_more(self.root, has_more)

    def finish_gradients(self) -> float:
        """Clip gradients, which backward passes have summed over ranks; their norm before, over all ranks."""
        trained = [p for group in self.inner.param_groups for p in group["params"]]
        return float(whole(nn.utils.clip_grad_norm_(trained, self.max_norm)))

    def step(self, learning_rate: float, *, with_tower: bool) -> None:
        """Step what has a gradient."""
        del with_tower  # torch's AdamW leaves out what has none
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()
