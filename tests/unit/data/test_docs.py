"""docs/data.md and the part of docs/grading.md about terms: every block works, every key exists, tables are the code's."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from polyturn.data.raw import RawWriter
from polyturn.data.sources import load_source
from polyturn.envs.base import load_object
from polyturn.params import DataParams, ImagesParams, Params, parse
from polyturn.params_tree import merge
from polyturn.pipeline import workspace
from polyturn.reward import parse_reference, score
from polyturn.types import Message, Problem, StopReason, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[3]
DATA = (ROOT / "docs" / "data.md").read_text()
GRADING = (ROOT / "docs" / "grading.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _module(monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> types.ModuleType:
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, name, "exec"), module.__dict__)
    return module


def _params(overlay: str) -> Params:
    return parse(merge(yaml.safe_load((ROOT / "params.yaml").read_text()), yaml.safe_load(overlay)))


def _replied(answer: str) -> Trajectory:
    turn = Turn((1,), (0.0,), f"It is \\boxed{{{answer}}}.", Message("tool", ("",)), {})
    return Trajectory(
        problem=Problem("p", "train", (), "12"),
        group_index=0,
        sibling=0,
        turns=(turn,),
        token_ids=np.zeros(1, np.int64),
        loss_mask=np.zeros(1, np.int8),
        logprobs=np.zeros(1, np.float32),
        images=(),
        stop_reason=StopReason.ENV_DONE,
        policy_version=0,
    )


def _fetched(params: DataParams, out: Path) -> list[dict[str, object]]:
    source = load_source(params, ImagesParams(), seed=3, work_dir=out)
    writer = RawWriter(out, source, params, None, parse_answer=parse_reference, on_row=lambda: None)
    assert not writer.write().set_aside
    return [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]


def test_the_blocks_are_those_that_are_tested_here() -> None:
    assert [len(_blocks(DATA, kind)) for kind in ("sh", "json", "python", "yaml")] == [1, 1, 1, 1]
    assert [len(_blocks(GRADING, kind)) for kind in ("python", "yaml")] == [1, 1]


def test_the_example_row_is_read(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(_blocks(DATA, "json")[0])
    (row,) = _fetched(DataParams(source="geo3k", path=str(tmp_path)), tmp_path / "raw")
    assert row["images"] == ["https://example.org/a1.png"]
    assert (row["split"], row["answer"], row["metadata"]) == ("train", "12", {"topic": "area"})


def test_the_first_command_makes_valid_params() -> None:
    words = _blocks(DATA, "sh")[0].splitlines()[0].split("#")[0].split()
    assert words[:2] == ["polyturn", "use"]
    overrides = workspace.parse_pairs(words[4::2])
    plan = workspace.compose(ROOT, recipe=words[2], overrides=overrides)
    assert (plan.params.data.source, plan.params.data.base_url) == ("geo3k", None)


def test_the_example_source_gives_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _module(monkeypatch, "plugins.sums", _blocks(DATA, "python")[0])
    params = _params(_blocks(DATA, "yaml")[0])
    rows = _fetched(params.data, tmp_path / "raw")
    for row in rows:
        assert sum(map(int, re.findall(r"\d+", str(row["problem"])))) == int(str(row["answer"]))
    assert [row["split"] for row in rows].count("validation") == 16
    load_object(params.env.build, "env.build")
    load_object(params.warmstart.examples, "warmstart.examples")


def test_the_example_terms_score(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(monkeypatch, "plugins.mine", _blocks(GRADING, "python")[0])
    reward = _params(_blocks(GRADING, "yaml")[0]).reward
    problem = Problem("p", "train", (), "12")
    right, whole, wrong = (_replied(answer) for answer in ("12", "7", "x"))
    assert [score(t, problem, reward).total for t in (right, whole, wrong)] == [1.1, 0.1, 0.0]
    assert (module.correctness(right, problem), module.correctness(whole, problem)) == (1.0, 0.0)


@pytest.mark.parametrize("text", [DATA, GRADING])
def test_keys_exist(text: str) -> None:
    sections = "|".join(Params.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.\w+)[`:]", text))
    assert named
    for name in named:
        section, _, key = name.partition(".")
        assert key in type(getattr(Params(), section)).model_fields, name
