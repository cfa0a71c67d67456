"""Process-wide torch settings that exact runs need."""

from __future__ import annotations

import torch

from polyturn.params import LearnerParams, Params


def set_up_torch(params: Params) -> None:
    """Pin the number of CPU threads and prefer deterministic kernels; call once, before any computation.

    What a GPU computes with is chosen by `polyturn.determinism`. Float32 is float32 in convolutions too, which cuDNN
    would round to TF32.
    """
    torch.set_num_threads(params.learner.num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False


def training_device(params: LearnerParams) -> torch.device:
    """Where learner.device puts the learner (and an embedded sampler) of this process.

    Raises:
        ValueError: a GPU is asked for, but torch sees none.
    """
    has_gpu = torch.cuda.is_available()
    if params.device == "cuda" and not has_gpu:
        raise ValueError(
            "learner.device is cuda, but torch sees no GPU here; set it to auto or cpu"
        )
    if params.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # a rank of several has chosen its own
