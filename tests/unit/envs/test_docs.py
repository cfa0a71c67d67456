"""docs/environments.md describes what is there: every code block runs, every key and name exists."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

import plugins
from polyturn.env_metrics import env_failure_metrics
from polyturn.envs import geo3k, single_turn, sokoban, zoom
from polyturn.envs.base import load_object, observation_message
from polyturn.params import Params, parse
from polyturn.params_tree import merge
from polyturn.types import StopReason

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "environments.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The first block, as if it were saved where the text says."""
    module = types.ModuleType("plugins.counting")
    monkeypatch.setitem(sys.modules, "plugins.counting", module)
    monkeypatch.setattr(plugins, "counting", module, raising=False)
    exec(compile(PYTHON[0], "plugins/counting.py", "exec"), module.__dict__)
    return module


def test_the_blocks_are_those_that_are_tested_here() -> None:
    assert (len(PYTHON), len(YAML)) == (2, 3)


def test_the_example_environment_does_what_the_second_block_says(
    counting: types.ModuleType,
) -> None:
    exec(compile(PYTHON[1], "docs/environments.md", "exec"), {"__name__": "example"})
    env = counting.CountingEnv(3, 32)
    first = observation_message(env, env.reset(seed=0)[0])
    assert (first.role, first.text) == ("user", "Show me 3 dots.")
    observation, done, info = env.step("no idea")
    assert (done, info) == (False, {"error": "no number"})
    assert observation_message(env, observation).images == ()


@pytest.mark.parametrize("block", YAML)
def test_overlays_are_valid_and_name_what_exists(block: str, counting: types.ModuleType) -> None:
    base = yaml.safe_load((ROOT / "params.yaml").read_text())
    overlay = yaml.safe_load(block)
    params = parse(merge(base, overlay))
    load_object(params.env.build, "env.build")
    for term in params.reward.terms:
        load_object(term.term, "reward.terms")
    if params.env.build.startswith("polyturn.envs.zoom"):
        zoom.ZoomParams.of(params.env.params)
    if "data" in overlay:
        load_object(params.data.source, "data.source")
        board, solution = sokoban.generate(0, sokoban.level_params(params.data.params))
        assert len(board.boxes) == 2
        assert solution


def test_every_shipped_environment_is_listed_with_its_params() -> None:
    rows = dict(
        re.findall(r"^\| `(polyturn\.envs\.\w+):build_env` \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    )
    assert set(rows) == {module.__name__ for module in (geo3k, single_turn, sokoban, zoom)}
    for name, told in rows.items():
        assert callable(importlib.import_module(name).build_env)
        named = set(re.findall(r"`(\w+)`", told.split("data.params")[0]))
        if name.endswith("zoom"):
            assert named == set(zoom.ZoomParams.__dataclass_fields__)
        if name.endswith("geo3k"):
            assert named == {"oracle", "rounding", "tolerance"}
    (levels,) = re.findall(r"`data\.params`: ([\w, ]+)\.", TEXT)
    assert set(levels.split(", ")) == set(sokoban.LevelParams.model_fields)


def test_keys_metrics_links_and_recipes_exist() -> None:
    sections = Params().model_dump()
    dotted = {
        name
        for name in re.findall(r"`([a-z]+\.[a-z_]+)[:`.]", TEXT)
        if name.split(".")[0] in sections
    }
    assert {"env.retries", "env.step_timeout_s", "rollout.max_turns"} <= dotted
    assert [key for key in dotted if key.split(".")[1] not in sections[key.split(".")[0]]] == []
    assert set(re.findall(r"`(env/\w+)`", TEXT)) == set(env_failure_metrics([]))
    assert {f"rollout/stop/{r}" for r in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)} == set(
        re.findall(r"`(rollout/stop/\w+)`", TEXT)
    )
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists()
    for recipe in re.findall(r"RECIPE=(\w+)", TEXT):
        assert (ROOT / "recipes" / f"{recipe}.yaml").is_file()
