"""Replies under construction: which rows still speak, and what all have said.

Shapes: B requests, A active rows, L longest reply that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyturn.sampler.base import SampleRequest


@dataclass(frozen=True)
class Swaps:
    """Rows [N] to exchange with rows [N] behind them, so that the active ones come first again."""

    one: Tensor
    other: Tensor


class Drafts:
    """The replies of one call; row i of the cache belongs to request `place[i]`, rows that have ended move back."""

    def __init__(self, requests: Sequence[SampleRequest], end_ids: Sequence[int]) -> None:
        self._ends = torch.tensor(end_ids)
        self._limits = torch.tensor([request.max_new_tokens for request in requests])
        longest = int(self._limits.max())
        draws = [np.random.default_rng(request.seed).random(longest) for request in requests]
        self._draws = torch.from_numpy(np.stack(draws))  # [B, L]
        self._temperatures = torch.tensor([request.temperature for request in requests])
        self._tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
        self._logprobs = torch.zeros(len(requests), longest)
        self._lengths = torch.zeros(len(requests), dtype=torch.int64)
        self.place = torch.arange(len(requests))  # [B]
        self.num_active = len(requests)
        self.num_steps = 0

    @property
    def active(self) -> Tensor:
        """The requests [A] of the active rows."""
        return self.place[: self.num_active]

    @property
    def uniform(self) -> Tensor:
        """The random numbers [A] of the next tokens."""
        return self._draws[self.active, self.num_steps]

    @property
    def temperatures(self) -> Tensor:
        """The active rows' temperatures [A]."""
        return self._temperatures[self.active]

    def take(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Swaps]:
        """Add one token to each active row; returns the tokens of the rows that go on, and how rows have to move."""
        active = self.active
        self._tokens[active, self.num_steps] = tokens
        self._logprobs[active, self.num_steps] = logprobs
        self._lengths[active] += 1
        self.num_steps += 1
        has_ended = torch.isin(tokens, self._ends) | (self.num_steps >= self._limits[active])
        self.num_active -= int(has_ended.sum())
        one = has_ended[: self.num_active].nonzero()[:, 0]
        other = (~has_ended[self.num_active :]).nonzero()[:, 0] + self.num_active
        moved = self.place[one]
        self.place[one], self.place[other] = self.place[other], moved
        tokens[one] = tokens[other]
        return tokens[: self.num_active], Swaps(one, other)

    def said(self, request: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Token ids and logprobs of one request's reply."""
        length = int(self._lengths[request])
        return (
            tuple(self._tokens[request, :length].tolist()),
            tuple(self._logprobs[request, :length].tolist()),
        )
