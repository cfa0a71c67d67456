"""Process-wide torch settings that exact runs need."""

from __future__ import annotations

import torch

from polyturn.params import Params


def set_up_torch(params: Params) -> None:
    """Pin the number of CPU threads and choose deterministic kernels; call once, before any computation."""
    torch.set_num_threads(params.learner.num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
