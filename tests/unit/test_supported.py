"""polyturn.supported: what this version cannot do is said before anything runs."""

from __future__ import annotations

import pytest

from polyturn.params import ParamsError, parse
from polyturn.supported import check_supported


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("learner", "backend", "megatron"),
    ],
)
def test_each_missing_part_is_named_with_its_key(section: str, key: str, value: object) -> None:
    with pytest.raises(ParamsError, match=rf"{section}\.{key}: {value} is not in this version"):
        check_supported(parse({section: {key: value}}))


def test_the_defaults_are_supported() -> None:
    check_supported(parse({}))


@pytest.mark.parametrize("backend", ["hf", "sglang"])
def test_both_samplers_are_supported(backend: str) -> None:
    check_supported(parse({"sampler": {"backend": backend}}))


def test_several_processes_are_supported() -> None:
    check_supported(parse({"learner": {"num_processes": 2}}))
