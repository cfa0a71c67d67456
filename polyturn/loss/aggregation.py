"""How tokens of sequences of different lengths add up to one loss."""

from __future__ import annotations

from torch import Tensor

from polyturn.params import LossParams


def token_weights(lengths: Tensor, params: LossParams) -> Tensor:
    """Weight of one token of each sequence, [B], from the numbers of trained tokens of all sequences, [B].

    `lengths` are those of the whole update: of all its micro-batches, on all ranks. token_mean: 1 / tokens of the
    update (DAPO). sequence_mean: 1 / (sequences x own length) (GRPO). constant: 1 / (sequences x
    constant_divisor) (Dr. GRPO, arXiv:2503.20783). A sequence without trained tokens adds nothing and is not
    counted.

        >>> import torch
        >>> token_weights(torch.tensor([0, 5, 7]), LossParams()).tolist() == [1 / 12] * 3
        True
        >>> token_weights(torch.tensor([0, 5, 10]), LossParams(aggregation="sequence_mean"))[1:].tolist()
        [0.1, 0.05]
    """
    lengths = lengths.double()
    num_sequences = (lengths > 0).sum().clamp(min=1).double()
    if params.aggregation == "token_mean":
        return (1 / lengths.sum().clamp(min=1)).expand(len(lengths))
    if params.aggregation == "sequence_mean":
        return 1 / (num_sequences * lengths.clamp(min=1))
    assert params.constant_divisor is not None
    return (1 / (num_sequences * params.constant_divisor)).expand(len(lengths))
