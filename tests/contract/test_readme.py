"""README describes main as it is: links, commands, params keys and the example environment."""

from __future__ import annotations

import re
import types
from pathlib import Path

import yaml

from polyturn.envs.base import EnvContext, Observation, build
from polyturn.params import Params
from polyturn.types import Message, Problem

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_links_point_to_files_of_the_repository() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_make_targets_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", README))
    defined = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= defined


def test_params_keys_exist() -> None:
    dotted = set(re.findall(r"`([a-z]+\.[a-z_]+)(?::[^`]*)?`", README))
    sections = Params().model_dump()
    keys = {name for name in dotted if name.split(".")[0] in sections}
    assert keys
    assert [key for key in keys if key.split(".")[1] not in sections[key.split(".")[0]]] == []


def test_dvc_stages_are_those_of_the_graph() -> None:
    stages = list(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    assert " -> ".join(stages) in README


def test_example_environment_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    module = types.ModuleType("guess")
    exec(compile(code.group(1), "README.md", "exec"), module.__dict__)
    problem = Problem("p", "train", (Message("user", ("How many sides has a square?",)),), "4")
    env = build(module.build_env, EnvContext(problem))
    assert env.step("no idea") == (
        Observation("Write \\boxed{NUMBER}.", role="user"),
        False,
        {"guess": None},
    )
    assert env.step(r"\boxed{5}") == (Observation("Too high.", role="user"), False, {"guess": "5"})
    assert env.step(r"\boxed{4}") == (Observation(), True, {"guess": "4"})
