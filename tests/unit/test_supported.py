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


@pytest.mark.parametrize(
    ("learner", "backend", "is_refused"),
    [
        ({}, "hf", True),
        ({"precision": "bfloat16"}, "hf", False),
        ({"lora": {}}, "hf", False),
        ({"num_processes": 2}, "hf", False),
        ({"device": "cpu"}, "hf", False),  # nothing is moved there
        ({}, "sglang", False),
    ],
)
def test_weights_that_are_sampled_with_cannot_be_offloaded(
    learner: dict[str, object], backend: str, is_refused: bool
) -> None:
    chosen = parse({"learner": {"offload": True, **learner}, "sampler": {"backend": backend}})
    if not is_refused:
        check_supported(chosen)
        return
    with pytest.raises(ParamsError, match=r"learner\.offload: true moves away the very weights"):
        check_supported(chosen)


@pytest.mark.parametrize("uri", ["gs://b/work", "http://host/work", "file:///work"])
def test_work_in_progress_lies_on_a_path_or_s3(uri: str) -> None:
    check_supported(parse({"train": {"work_uri": "s3://b/work"}}))
    with pytest.raises(ParamsError, match=rf"train\.work_uri must be a path or s3://.*got {uri}"):
        check_supported(parse({"train": {"work_uri": uri}}))


def test_the_defaults_are_supported() -> None:
    check_supported(parse({}))


@pytest.mark.parametrize("backend", ["hf", "sglang"])
def test_both_samplers_are_supported(backend: str) -> None:
    check_supported(parse({"sampler": {"backend": backend}}))


def test_several_processes_are_supported() -> None:
    check_supported(parse({"learner": {"num_processes": 2}}))
