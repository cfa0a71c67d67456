"""Which kernels are required, and what the run is labelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyturn import determinism, replayable
from polyturn.params import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, torch
from polyturn.determinism import choose_kernels
from polyturn.runtime import set_up_torch
from polyturn.params import Params, TrainParams
params = Params(train=TrainParams(deterministic=%s))
set_up_torch(params)
choose_kernels(params)
print(json.dumps({
    "enabled": torch.are_deterministic_algorithms_enabled(),
    "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    "cudnn": torch.backends.cudnn.deterministic,
    "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
}))
"""


@pytest.mark.parametrize("is_strict", [False, True])
def test_deterministic_kernels_are_preferred_or_required(is_strict: bool) -> None:
    """In a process of its own, since the setting is the process's."""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % is_strict],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "enabled": True,
        "warn_only": not is_strict,
        "cudnn": is_strict,
        "cublas": ":4096:8" if is_strict else None,
    }


@pytest.mark.parametrize(
    ("has_gpu", "device", "is_asked", "chosen"),
    [
        (False, "auto", False, []),
        (True, "cpu", False, []),
        (True, "auto", False, [False]),
        (True, "cuda", False, [False]),
        (True, "auto", True, [True]),
        (False, "auto", True, [True]),
    ],
)
def test_a_gpu_has_its_fastest_kernels_unless_others_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str, is_asked: bool, chosen: list[bool]
) -> None:
    found: list[bool] = []
    cudnn = SimpleNamespace(deterministic=False, benchmark=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", found.append)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    determinism.choose_kernels(
        parse({"learner": {"device": device}, "train": {"deterministic": is_asked}})
    )
    assert found == chosen
    assert cudnn.deterministic is is_asked


@pytest.mark.parametrize(
    ("has_gpu", "train", "sampler", "label"),
    [
        (False, {}, {}, True),
        (False, {}, {"backend": "sglang", "sglang": {"deterministic": False}}, False),
        (True, {}, {}, False),
        (True, {"deterministic": True}, {}, True),
        (True, {"deterministic": True}, {"backend": "sglang"}, True),
        (True, {}, {"backend": "sglang"}, False),
        (
            True,
            {"deterministic": True},
            {"backend": "sglang", "sglang": {"deterministic": False}},
            False,
        ),
    ],
)
def test_a_run_is_labelled_replayable_if_every_part_of_it_is(
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    train: dict[str, object],
    sampler: dict[str, object],
    label: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert replayable.is_replayable(parse({"train": train, "sampler": sampler})) is label
