"""Whether the same training run comes out with the same bytes, and the kernels that this takes on a GPU."""

from __future__ import annotations

import os

import torch

from polyturn.params import Params


def choose_kernels(params: Params) -> None:
    """Require deterministic kernels if train.deterministic asks for them; call in each process, before it computes.

    Where `set_up_torch` only prefers them, the backward pass of flash attention still adds in any order. Required, it
    has an order, and an operation that has no deterministic kernel is an error.
    """
    if params.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first matmul
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def is_replayable(params: Params) -> bool:
    """The run's label: whether the same run again gives the same bytes.

    On a CPU it always does; on a GPU with train.deterministic, and with SGLang's own switch where it samples.
    """
    is_sampler_exact = params.sampler.backend == "hf" or params.sampler.sglang.deterministic
    return is_sampler_exact and (params.train.deterministic or not torch.cuda.is_available())
