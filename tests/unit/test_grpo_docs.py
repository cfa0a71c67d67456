"""docs/grpo.md names only what exists, and all of it: keys, their defaults, choices, and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from polyturn.learner.base import UpdateStats
from polyturn.loss import policy_loss
from polyturn.params import LossParams, Params
from polyturn.params.reward import OverlongParams
from polyturn.training.metrics import update_metrics
from tests.unit.loss_cases import inputs_of, padded

KEY = re.compile(r"`((?:loss|reward|rollout|learner|train)(?:\.[a-z_]+)+)[`:]")
METRIC = re.compile(r"`(train/[a-z_/]+)`")
SWITCHED_ON = (
    {"tis_mode": "sequence_mask", "kl_coef": 0.1, "entropy_coef": 0.1, "dual_clip": 3.0},
    {"tis_mode": "token_truncate"},
)


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "grpo.md").read_text()


def default_of(key: str) -> object:
    """The default of a dotted key; an error if there is none."""
    section: object = Params()
    for part in key.split("."):
        if section is None and key.startswith("reward.overlong."):
            section = OverlongParams(max_tokens=2, buffer_tokens=1)
        assert isinstance(section, BaseModel), key
        assert part in type(section).model_fields, key
        section = getattr(section, part)
    return section


def test_every_key_that_is_named_exists_and_every_key_of_the_loss_is_named(text: str) -> None:
    named = set(KEY.findall(text))
    for key in named:
        default_of(key)
    assert {f"loss.{name}" for name in LossParams.model_fields} <= named
    assert {f"reward.overlong.{name}" for name in OverlongParams.model_fields} <= named


def test_every_choice_is_named(text: str) -> None:
    for field in LossParams.model_fields.values():
        for choice in get_args(field.annotation):
            if isinstance(choice, str):
                assert re.search(rf"`(\w+\.\w+: )?{choice}`", text), choice


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("loss.advantage_estimator", "`grpo` (default)"),
        ("loss.normalize_std", "`loss.normalize_std` (default true)"),
        ("loss.surrogate", "`loss.surrogate: clip` (default)"),
        ("loss.clip_low", "`loss.clip_low` (0.2)"),
        ("loss.clip_high", "`loss.clip_high` (0.28)"),
        ("loss.aggregation", "`token_mean` (default)"),
        ("loss.kl_coef", "(default 0: no reference"),
        ("loss.kl_estimator", "`k3` (default)"),
        ("loss.entropy_coef", r"$\eta$ (default 0)"),
        ("loss.tis_mode", "`none` (default)"),
        ("loss.tis_clip", "default to 0 and 2 "),
    ],
)
def test_defaults_are_those_of_the_code(text: str, key: str, said: str) -> None:
    assert said in text
    default = default_of(key)
    spelled = f"{default:g}" if isinstance(default, float) else str(default).lower()
    assert spelled in said


def test_presets_are_valid(text: str) -> None:
    presets = re.findall(r"^\| [^|]+ \| `(\{.*?\})`", text, flags=re.MULTILINE)
    assert len(presets) == 7
    chosen = [LossParams.model_validate(yaml.safe_load(preset)) for preset in presets]
    assert chosen[0] == LossParams()
    assert len(set(map(repr, chosen))) == 7


def test_metrics_that_are_named_are_logged_and_the_other_way_round(text: str) -> None:
    logged: set[str] = set()
    for chosen in SWITCHED_ON:
        params = LossParams.model_validate(chosen)
        sums = policy_loss(inputs_of(padded(), params), params).sums
        logged |= set(update_metrics([UpdateStats(1.0, 1e-3, 1, sums.values())], gap=0.0))
    assert set(METRIC.findall(text)) == logged
