"""docs/registry.md names keys, commands, files and variables that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from flows import alias_webhook
from polyturn.cli import commands as cli
from polyturn.params import Params
from polyturn.tracking import credentials

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/registry.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]


def test_params_keys_exist() -> None:
    sections = Params().model_dump()
    dotted = set(re.findall(r"`([a-z]+)\.([a-z_]+)(?::[^`]*)?`", TEXT))
    named = [(section, key) for section, key in dotted if section in sections]
    assert len(named) >= 7
    assert [key for section, key in named if key not in sections[section]] == []


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("polyturn ")])
def test_commands_are_understood(line: str) -> None:
    cli.build_parser().parse_args(shlex.split(line)[1:])


def test_the_deployments_and_variables_are_those_of_the_code() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    names = {f"{Path(d['entrypoint'].split(':')[0]).stem}/{d['name']}" for d in deployments}
    assert {"compare/versions", alias_webhook.DEPLOYMENT} <= names
    assert alias_webhook.DEPLOYMENT in TEXT
    assert "compare/versions" in TEXT
    for name in (credentials.USERNAME, credentials.PASSWORD, alias_webhook.SECRET_VARIABLE):
        assert name in TEXT


def test_named_files_exist() -> None:
    for name in re.findall(r"`((?:polyturn|flows)/\w+\.py)`", TEXT):
        assert (ROOT / name).is_file(), name
