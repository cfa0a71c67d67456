"""Where the learner of a process lives."""

from __future__ import annotations

import pytest
import torch

from polyturn.params import LearnerParams
from polyturn.runtime import training_device


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, auto = (LearnerParams(device=name) for name in ("cpu", "cuda", "auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device(auto) == training_device(cpu) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"learner.device is cuda, but torch sees no GPU"):
        training_device(cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert training_device(auto) == training_device(cuda) == torch.device("cuda", 3)
    assert training_device(cpu) == torch.device("cpu")
