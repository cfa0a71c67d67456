"""DeepStack (arXiv:2406.04334) at rows that are known beforehand: a GPU need not be asked how many there are."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def install(model: PreTrainedModel) -> None:
    """Let the decoder of a Qwen3-VL take `visual_pos_masks` as rows [P] int64 of the B T states, too."""
    decoder = model.model.language_model
    if hasattr(decoder, "_deepstack_process"):
        decoder._deepstack_process = add_features


def add_features(states: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """States [B, T, H] plus features [P, H] at `places`: rows [P], or a mask [B, T] as transformers makes it.

    >>> places = torch.tensor([[False, True]])
    >>> add_features(torch.zeros(1, 2, 1), places, torch.ones(1, 1)).tolist()
    [[[0.0], [1.0]]]
    """
    rows = places.view(-1).nonzero()[:, 0] if places.dtype == torch.bool else places
    flat = states.flatten(0, 1)
    return flat.index_add(0, rows, features.to(states.dtype)).view_as(states)
