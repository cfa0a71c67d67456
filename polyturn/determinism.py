"""The kernels that a GPU computes with: its fastest ones, or such as give the same bytes again."""

from __future__ import annotations

import os

import torch

from polyturn.params import Params
from polyturn.runtime import training_device


def choose_kernels(params: Params) -> None:
    """Require deterministic kernels if train.deterministic asks for them, else take a GPU's fastest ones.

    Call in each process after `set_up_torch`, before it computes. That only prefers them, which is enough on a CPU. On a
    GPU it would be slow (new tensors are filled first) and not enough: the backward pass of flash attention still adds
    in any order. Required, it has an order, and an operation that has no deterministic kernel is an error.
    """
    if params.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first matmul
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    elif training_device(params.learner).type == "cuda":
        torch.use_deterministic_algorithms(False)
