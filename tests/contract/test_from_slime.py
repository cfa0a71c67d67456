"""docs/from_slime.md: every key, metric, recipe and object that it names on our side exists."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from polyturn.envs.base import load_object
from polyturn.params import Params, parse
from tests.unit import tiny
from tests.unit.loop import Run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from_slime.md").read_text()
SECTIONS = ("Data", "Rollout and environment", "Environment API", "Loss and optimizer",
            "Engines and parallelism", "Evaluation, checkpoints, logging", "Metrics")  # fmt: skip


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of params, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            for inner in (kind, *typing.get_args(kind)):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from keys(inner, f"{prefix}{name}.")


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_row_has_their_name_and_ours_or_a_reason(title: str) -> None:
    found = rows(title)
    assert len(found) >= 9
    for row in found:
        assert len(row) == 3, row
        theirs, ours, remark = row
        assert theirs
        assert code(ours) or (ours == "-" and (remark or theirs.startswith("memory"))), row


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "Metrics"])
def test_every_key_that_is_named_exists(title: str) -> None:
    known = set(keys(Params))
    named = {name for row in rows(title) for name in code(row[1])}
    assert named - known == set()


def test_keys_and_objects_in_the_text_exist() -> None:
    known = set(keys(Params))
    sections = set(Params.model_fields)
    for text in code(PAGE):
        name = text.partition(":")[0].strip()
        if re.fullmatch(r"\w+(\.\w+)+", name) and name.partition(".")[0] in sections:
            assert name in known, text
        if re.fullmatch(r"polyturn(\.\w+)+:\w+", text):
            load_object(text, "docs/from_slime.md")
        if text.startswith("polyturn use "):
            assert (ROOT / "recipes" / f"{text.split()[2]}.yaml").is_file(), text


def test_the_metrics_are_those_of_a_run(tmp_path: Path) -> None:
    tree = {
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_turns": 2, "max_turn_tokens": 4,
                    "max_new_tokens": 8, "blind_problems": 0},
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "tis_mode": "token_truncate"},
        "train": {"steps": 2, "updates_per_rollout": 1, "eval_every": 1,
                  "dynamic_sampling": {"filters": ["polyturn.group_filters:no_aborted"], "prompts_per_round": 3}},
        "env": {"tools_in_prompt": False},
    }  # fmt: skip
    run = Run(tmp_path, parse(tree), tiny.qwen3())
    run.train()
    logged = {name for _, metrics in run.sink.steps for name in metrics}
    # Of other samplers and of asynchronous steps: the loop of this run has none.
    elsewhere = {"perf/prefix_cache_hit_rate", "perf/train_wait_time"}
    source = "".join(path.read_text() for path in (ROOT / "polyturn").rglob("*.py"))
    assert all(f'"{name}"' in source for name in elsewhere)
    named = {
        name for row in rows("Metrics") for cell in row[1:] for name in code(cell) if "/" in name
    }
    assert len(named) > 25
    assert named - logged - elsewhere == set()
