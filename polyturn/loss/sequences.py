"""Sums and means of token values over the sequences of a micro-batch (N tokens, B sequences)."""

from __future__ import annotations

from torch import Tensor


def token_counts(sequence: Tensor) -> Tensor:
    """[N] sequence of each token -> [B] float: the number of tokens of each sequence, 0 for those without."""
    return sequence.bincount().float()


def sequence_sums(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] values, [N] sequence of each -> [B] sums.

    >>> import torch
    >>> sequence_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2])).tolist()
    [3.0, 0.0, 4.0]
    """
    number = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(number).index_add(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] values, [N] sequence of each -> [N]: at each token the mean over its sequence.

    >>> import torch
    >>> sequence_means(torch.tensor([1.0, 3.0, 4.0]), torch.tensor([0, 0, 2])).tolist()
    [2.0, 2.0, 4.0]
    """
    counts = token_counts(sequence).to(values.dtype)
    return sequence_sums(values, sequence)[sequence] / counts[sequence]
