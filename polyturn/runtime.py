"""Process-wide torch settings that exact runs need."""

from __future__ import annotations

import torch

from polyturn.params import Params


def set_up_torch(params: Params) -> None:
    """Pin the number of CPU threads and choose deterministic kernels; call once, before any computation."""
    torch.set_num_threads(params.learner.num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


def memory_advice(error: BaseException) -> str | None:
    """Which params key to lower when `error` says that memory ran out; None for any other error."""
    is_memory = isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
    if not is_memory:
        return None
    return (
        "out of memory: lower learner.micro_batch_tokens (while training) or rollout.prompts_per_step, "
        "rollout.group_size or evaluate.batch_size (while sampling)"
    )
