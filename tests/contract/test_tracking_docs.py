"""docs/tracking.md names keys, commands and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

from polyturn.cli import commands as cli
from polyturn.params import Params

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tracking.md").read_text()


def test_keys_exist() -> None:
    named = set(re.findall(r"`((?:tracking|registry|env)\.\w+)`", PAGE))
    assert len(named) >= 9
    for name in named:
        section, _, key = name.partition(".")
        assert key in type(getattr(Params(), section)).model_fields, name


def test_commands_are_understood() -> None:
    commands = re.findall(r"`polyturn ([^`]+)`", PAGE)
    assert {command.split()[0] for command in commands} == {"fetch-model", "gc", "pin", "doctor"}
    for command in commands:
        assert callable(cli.build_parser().parse_args(command.split()).run)
