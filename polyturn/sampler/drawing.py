"""Draws one token per row from its distribution, with the row's own uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # tokens summed at once; only blocks' sums and the chosen block leave the device


def draw_tokens(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [N] by inverse transform sampling; log-probabilities [N, V], uniform [N] in [0, 1), float64, CPU.

    The token is the first whose cumulative probability exceeds uniform x total, so that one of probability 0 is
    never drawn. Sums are float64; running sums are taken on the CPU, where their order is fixed. For
    probabilities 0.2, 0, 0.8:

        >>> draw_tokens(torch.tensor([[0.2, 0.0, 0.8]]).log().expand(3, 3), torch.tensor([0.1, 0.21, 0.99]).double())
        tensor([0, 2, 2])
    """
    rows, vocabulary = distribution.shape
    probabilities = distribution.double().exp()
    blocks = -(-vocabulary // BLOCK)
    if blocks > 1:
        probabilities = torch.nn.functional.pad(probabilities, (0, blocks * BLOCK - vocabulary))
    probabilities = probabilities.view(rows, blocks, -1)
    before = probabilities.sum(-1).cpu().cumsum(-1)  # [N, blocks]
    block = _first_above(before, uniform * before[:, -1])
    inside = probabilities[torch.arange(rows), block.to(distribution.device)].cpu().cumsum(-1)
    start = torch.where(block > 0, before.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return block * BLOCK + _first_above(inside, uniform * before[:, -1] - start)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above `target` [N]; rounding never leads beyond the last one that grows."""
    largest = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    return (cumulative <= torch.minimum(target, largest)[:, None]).sum(-1)
