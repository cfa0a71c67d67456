"""What two_gpu_learners.py runs: layouts of ranks, precisions, and the record of a run; imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]
NUM_UPDATES = 5
LR = 1e-4
USUAL_EPS, LARGE_EPS = 1e-8, 1e-6


@dataclass(frozen=True)
class Layout:
    """A learner and how its ranks share the work."""

    name: str
    backend: str
    params: Mapping[str, object] = field(default_factory=dict)


ONE = (Layout("FSDP x1", "fsdp"), Layout("Megatron x1", "megatron"))
TWO = (
    Layout("FSDP2 x2", "fsdp", {"num_processes": 2}),
    Layout("Megatron DP2", "megatron", {"num_processes": 2}),
    Layout("Megatron TP2", "megatron", {"num_processes": 2, "tensor_parallel": 2}),
    Layout(
        "Megatron TP2+SP",
        "megatron",
        {"num_processes": 2, "tensor_parallel": 2, "sequence_parallel": True},
    ),
)


@dataclass(frozen=True)
class Case:
    """One run. `variant` 0 is the one that is compared; others have other micro-batches and samples in another order."""

    layout: str
    precision: str
    eps: float
    variant: int = 0

    @property
    def key(self) -> str:
        """A name for its file."""
        plain = self.layout.replace(" ", "-")
        return f"{plain}_{self.precision}_{self.eps:g}_{self.variant}"


@dataclass(frozen=True)
class Run:
    """Loss of every update and norm of its gradient; the ways of the weights are in the file of the case's key."""

    case: Case
    losses: Sequence[float]
    norms: Sequence[float]
    seconds: float
