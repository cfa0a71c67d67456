"""Splits samples over ranks and micro-batches, balanced by tokens and image patches; a pure function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids (as bytes), picture hashes and number of tokens; equal ones are run once."""

    token_ids: bytes
    images: tuple[str, ...]
    length: int


@dataclass(frozen=True)
class Load:
    """What one sample asks for: all its tokens, the part that siblings share, and patches by picture hash."""

    num_tokens: int
    prompt: Prompt
    patches: Mapping[str, int]


@dataclass
class _Bin:
    """One micro-batch of one rank while it is filled."""

    patch_cost: float
    cost: float = 0.0
    samples: list[int] = field(default_factory=list[int])
    prompts: set[Prompt] = field(default_factory=set[Prompt])
    images: set[str] = field(default_factory=set[str])

    def added(self, load: Load) -> float:
        """What `load` would add: tokens of a prompt and patches of a picture that are here already are free."""
        tokens = load.num_tokens - (load.prompt.length if load.prompt in self.prompts else 0)
        patches = sum(n for image, n in load.patches.items() if image not in self.images)
        return tokens + self.patch_cost * patches

    def add(self, index: int, load: Load) -> None:
        """Take one sample."""
        self.cost += self.added(load)
        self.samples.append(index)
        self.prompts.add(load.prompt)
        self.images.update(load.patches)


def partition(
    loads: Sequence[Load], *, num_ranks: int, max_tokens: int, patch_cost: float
) -> list[list[list[int]]]:
    """Indices of `loads` by rank and micro-batch; every rank has the same number of micro-batches.

    The cost of a micro-batch is its tokens, a prompt that siblings share counted once, plus `patch_cost` tokens
    for each patch of its distinct pictures (0 for a frozen vision tower). It stays within `max_tokens` unless a
    sample alone exceeds it. The j-th micro-batches of all ranks run at the same time, so bins of similar cost
    are given to them. Siblings stay together unless splitting them makes the slowest rank faster. A rank may get
    empty micro-batches when there are fewer samples than ranks.

    Eight samples of 4, 3, 3, 2 tokens, twice, on two ranks with room for 12 tokens:

        >>> loads = [Load(n, Prompt(b"", (), 0), {}) for n in (4, 3, 3, 2, 4, 3, 3, 2)]
        >>> partition(loads, num_ranks=2, max_tokens=12, patch_cost=0.0)
        [[[0, 1, 3, 5]], [[2, 4, 6, 7]]]
    """
    total = sum(
        _cost(group, loads, patch_cost) for group in _pieces(loads, math.inf, math.inf, patch_cost)
    )
    share = total / (num_ranks * max(1, math.ceil(total / (num_ranks * max_tokens))))
    candidates = [
        _fill(
            _pieces(loads, size, max_tokens, patch_cost), loads, num_ranks, max_tokens, patch_cost
        )
        for size in (math.inf, share, share / 2, share / 4)
    ]
    bins = min(candidates, key=lambda bins: _duration(bins, num_ranks))
    bins.sort(key=lambda one: -one.cost)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for first in range(0, len(bins), num_ranks):
        together = bins[first : first + num_ranks]
        # Every other micro-batch goes round the ranks backwards, so that their sums come out alike.
        order = range(num_ranks) if first // num_ranks % 2 == 0 else reversed(range(num_ranks))
        for rank, one in zip(order, together, strict=True):
            ranks[rank].append(sorted(one.samples))
    return ranks


def _pieces(
    loads: Sequence[Load], size: float, max_tokens: float, patch_cost: float
) -> list[list[int]]:
    """Siblings in even pieces of about `size`, none above `max_tokens` unless a sample alone is."""
    groups: dict[Prompt, list[int]] = {}
    alone: list[list[int]] = []
    for index, load in enumerate(loads):
        if load.prompt.length:
            groups.setdefault(load.prompt, []).append(index)
        else:
            alone.append([index])
    pieces = list(alone)
    for group in groups.values():
        rest = sorted(group, key=lambda index: (-loads[index].num_tokens, index))
        number = min(len(rest), max(1, math.ceil(_cost(rest, loads, patch_cost) / size)))
        while number < len(rest):
            cut = [rest[start::number] for start in range(number)]
            if max(_cost(piece, loads, patch_cost) for piece in cut) <= max_tokens:
                break
            number += 1
        pieces += [rest[start::number] for start in range(number)]
    return pieces


def _fill(
    pieces: Sequence[Sequence[int]],
    loads: Sequence[Load],
    num_ranks: int,
    max_tokens: int,
    patch_cost: float,
) -> list[_Bin]:
    """Longest piece first into the emptiest bin, with as few micro-batches per rank as the budget allows."""
    costs = {id(piece): _cost(piece, loads, patch_cost) for piece in pieces}
    order = sorted(pieces, key=lambda piece: (-costs[id(piece)], piece[0]))
    most = max(1, math.ceil(len(order) / num_ranks))
    steps = min(most, max(1, math.ceil(sum(costs.values()) / (num_ranks * max_tokens))))
    while True:
        bins = [_Bin(patch_cost) for _ in range(num_ranks * steps)]
        for piece in order:
            emptiest = min(bins, key=lambda one: one.cost)
            for index in piece:
                emptiest.add(index, loads[index])
        if all(one.cost <= max_tokens or len(one.samples) == 1 for one in bins) or steps == most:
            return bins
        steps += 1


def _cost(piece: Sequence[int], loads: Sequence[Load], patch_cost: float) -> float:
    one = _Bin(patch_cost)
    for index in piece:
        one.add(index, loads[index])
    return one.cost


def _duration(bins: Sequence[_Bin], num_ranks: int) -> float:
    """Ranks wait for each other after every micro-batch: the sum over steps of the slowest."""
    costs = sorted((one.cost for one in bins), reverse=True)
    return sum(costs[::num_ranks])
