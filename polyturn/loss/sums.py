"""Metrics of an update as sums that add over micro-batches and ranks and are divided once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


def mean_of(values: Tensor) -> Tensor:
    """[N] -> [2] float64: their sum and their number."""
    values = values.detach().double()
    return torch.stack([values.sum(), values.new_tensor(float(len(values)))])


def max_of(values: Tensor) -> Tensor:
    """[N], none of them negative -> [] float64: the largest, 0 if there is none."""
    values = values.detach().double()
    return values.max() if len(values) else values.new_zeros(())


@dataclass(frozen=True)
class MetricSums:
    """Metrics of some tokens, by name without the area (`pg_loss` is logged as `train/pg_loss`).

    parts [] are already divided by the update's denominator and add up; means [2] hold sum and count; maxima []
    are largest values, and their names, no others, end in _max. The names depend on the loss params alone, so that every rank has the same, also one
    without tokens.
    """

    parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    means: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def beside(self, other: MetricSums) -> MetricSums:
        """Other metrics of the same tokens, in one record."""
        return MetricSums(
            {**self.parts, **other.parts},
            {**self.means, **other.means},
            {**self.maxima, **other.maxima},
        )

    def merge(self, other: MetricSums) -> MetricSums:
        """The same metrics over the tokens of both.

            >>> one = MetricSums(means={"entropy": mean_of(torch.tensor([1.0, 2.0]))})
            >>> two = MetricSums(means={"entropy": mean_of(torch.tensor([6.0]))})
            >>> one.merge(two).values()
            {'entropy': 3.0}

        Raises:
            ValueError: they are not the same metrics.
        """
        return MetricSums(
            _joined(self.parts, other.parts, torch.add),
            _joined(self.means, other.means, torch.add),
            _joined(self.maxima, other.maxima, torch.maximum),
        )

    def all_reduced(self, group: dist.ProcessGroup | None = None) -> MetricSums:
        """The same metrics over the tokens of all ranks (collective: two all-reduces)."""
        added = [*self.parts.values(), *self.means.values()]
        sums = _all_reduced(added, "sum", group)
        return MetricSums(
            dict(zip(self.parts, sums, strict=False)),
            dict(zip(self.means, sums[len(self.parts) :], strict=True)),
            dict(
                zip(
                    self.maxima,
                    _all_reduced(list(self.maxima.values()), "max", group),
                    strict=True,
                )
            ),
        )

    def values(self) -> dict[str, float]:
        """The metrics; a mean over nothing is 0. The tensors reach the host in one copy."""
        names = [*self.parts, *self.means, *self.maxima]
        if not names:
            return {}
        means = [sum_ / count.clamp(min=1) for sum_, count in self.means.values()]
        numbers = torch.stack([*self.parts.values(), *means, *self.maxima.values()]).cpu()
        return {name: float(number) for name, number in zip(names, numbers, strict=True)}


def merged(sums: Iterable[MetricSums]) -> MetricSums:
    """All of them in one; of none, no metrics."""
    total: MetricSums | None = None
    for one in sums:
        total = one if total is None else total.merge(one)
    return total or MetricSums()


def _joined(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], join: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    if one.keys() != other.keys():
        raise ValueError(f"different metrics cannot be merged: {sorted(one)} and {sorted(other)}")
    return {name: join(value, other[name]) for name, value in one.items()}


def _all_reduced(
    tensors: list[Tensor], operation: Literal["sum", "max"], group: dist.ProcessGroup | None
) -> list[Tensor]:
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    operator = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
    dist.all_reduce(flat, operator, group)  # pyright: ignore[reportUnknownMemberType]
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    starts = [0, *ends[:-1]]
    return [
        flat[start:end].view_as(tensor)
        for start, end, tensor in zip(starts, ends, tensors, strict=True)
    ]
