"""Whether the same training run comes out with the same bytes."""

from __future__ import annotations

import torch

from polyturn.params import Params


def is_replayable(params: Params) -> bool:
    """The run's label: whether the same run again gives the same bytes.

    On a CPU it always does; on a GPU with train.deterministic, and with SGLang's own switch where it samples.
    """
    is_sampler_exact = params.sampler.backend == "hf" or params.sampler.sglang.deterministic
    return is_sampler_exact and (params.train.deterministic or not torch.cuda.is_available())
