"""polyturn.supported: what this version cannot do is said before anything runs."""

from __future__ import annotations

import pytest

from polyturn.params import ParamsError, parse
from polyturn.supported import check_supported


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sampler", "backend", "sglang"),
        ("learner", "backend", "megatron"),
    ],
)
def test_each_missing_part_is_named_with_its_key(section: str, key: str, value: object) -> None:
    with pytest.raises(ParamsError, match=rf"{section}\.{key}: {value} is not in this version"):
        check_supported(parse({section: {key: value}}))


def test_the_defaults_are_supported() -> None:
    check_supported(parse({}))


def test_several_processes_are_supported() -> None:
    check_supported(parse({"learner": {"num_processes": 2}}))
