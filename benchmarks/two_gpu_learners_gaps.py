"""How far two runs of two_gpu_learners.py are apart, and whether that is near enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.two_gpu_learners_cases import LR, Run, Tensors

FLOAT32_LIMIT = 1e-4  # relative, of loss and gradient norm
WEIGHTS_LIMIT = 1e-2  # learning rates
NOISE_FACTOR = 2.0


@dataclass(frozen=True)
class Gap:
    """How far a run is from another one.

    `loss`, `grad_norm`: of the first update, relative; `last_loss` of the last. `way`: norm of the difference over
    norm of the way, all weights together, and `worst_way` of the worst tensor; `mean_weight` and `largest_weight` in
    learning rates, root mean square and largest.
    """

    loss: float
    grad_norm: float
    last_loss: float
    way: float
    cosine: float
    mean_weight: float
    worst_way: float
    worst_tensor: str
    largest_weight: float


NUMBERS = ("loss", "grad_norm", "last_loss", "way", "mean_weight", "worst_way", "largest_weight")


def float32_agrees(usual: Gap, large: Gap) -> bool:
    """Loss, norm, and the ways with a large eps to 1e-4; with the usual one the weights on average."""
    return (
        max(usual.loss, usual.grad_norm, large.way) <= FLOAT32_LIMIT
        and usual.mean_weight <= WEIGHTS_LIMIT
    )


def bfloat16_agrees(found: Gap, noise: Gap) -> bool:
    """Loss, norm and the way of the weights within NOISE_FACTOR times the noise."""
    return all(
        getattr(found, name) <= NOISE_FACTOR * getattr(noise, name)
        for name in ("loss", "grad_norm", "way")
    )


def gap_of(run: Run, ways: Tensors, other: Run, other_ways: Tensors) -> Gap:
    """How far `run` is from `other`; a tensor that has not moved there is 1 away where it moved here.

    One weight that went 3 and 4 in one run and 3 and 5 in the other: the way is 1 / sqrt(34).
    """
    if ways.keys() != other_ways.keys():
        raise ValueError(f"not the same tensors: {sorted(ways.keys() ^ other_ways.keys())[:4]}")
    apart = own = theirs = product = largest = 0.0
    worst, worst_tensor, count = 0.0, "", 0
    for name, way in ways.items():
        mine, wanted = way.double(), other_ways[name].double()
        difference = mine - wanted
        square = float(difference.square().sum())
        own_square, wanted_square = float(mine.square().sum()), float(wanted.square().sum())
        apart += square
        own += own_square
        theirs += wanted_square
        product += float((mine * wanted).sum())
        count += way.numel()
        largest = max(largest, float(difference.abs().max()))
        relative = math.sqrt(square / max(wanted_square, own_square, 1e-300))
        if relative >= worst:
            worst, worst_tensor = relative, name
    return Gap(
        loss=relative_gap(run.losses[0], other.losses[0]),
        grad_norm=relative_gap(run.norms[0], other.norms[0]),
        last_loss=relative_gap(run.losses[-1], other.losses[-1]),
        way=math.sqrt(apart / theirs),
        cosine=product / math.sqrt(own * theirs),
        mean_weight=math.sqrt(apart / count) / LR,
        worst_way=worst,
        worst_tensor=worst_tensor,
        largest_weight=largest / LR,
    )


def relative_gap(one: float, other: float) -> float:
    """Difference over the size of the second."""
    return abs(one - other) / abs(other)


def rounded(gap: Gap) -> dict[str, object]:
    """Three digits, of the cosine ten."""
    told = {name: float(f"{getattr(gap, name):.3g}") for name in NUMBERS}
    return {**told, "cosine": round(gap.cosine, 10), "worst_tensor": gap.worst_tensor}
