"""docs/learner.md names every key that is about where, how and in which precision the learner computes."""

from __future__ import annotations

import re
from pathlib import Path

from polyturn.params import LearnerParams, LoraParams

# Of the optimizer and its schedule: params/learner.py says what there is to say.
OPTIMIZER = {
    "backend",
    "num_threads",
    "lr",
    "warmup_steps",
    "schedule",
    "decay_steps",
    "min_lr_fraction",
    "betas",
    "eps",
    "weight_decay",
    "grad_clip",
}


def test_every_key_is_explained(root: Path) -> None:
    words = set(re.findall(r"\w+", (root / "docs/learner.md").read_text()))
    assert set(LearnerParams.model_fields) - OPTIMIZER <= words
    assert set(LoraParams.model_fields) <= words


def test_keys_in_code_exist(root: Path) -> None:
    text = (root / "docs/learner.md").read_text()
    keys = re.findall(r"`(\w+): \w+`", text)
    assert {"precision", "freeze_vision", "old_logprobs", "device"} <= set(keys)
    assert set(keys) <= set(LearnerParams.model_fields)
