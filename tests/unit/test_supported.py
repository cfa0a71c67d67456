"""polyturn.supported: what this version cannot do is said before anything runs."""

from __future__ import annotations

import pytest

from polyturn.learner.megatron import versions
from polyturn.params import ParamsError, parse
from polyturn.supported import check_supported

MEGATRON = {"backend": "megatron", "num_processes": 4}


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"num_processes": 2, "tensor_parallel": 2}, "tensor_parallel: 2 .* learner.backend: fsdp"),
        ({**MEGATRON, "pipeline_parallel": 2}, "pipeline_parallel: 2 is not built .* set it to 1"),
        ({**MEGATRON, "context_parallel": 2}, "context_parallel: 2 is not built .* set it to 1"),
        ({"context_parallel": 2}, "context_parallel: 2 is not built"),
        (
            {**MEGATRON, "tensor_parallel": 2, "compile": True},
            "compile: true does not go with learner.tensor_parallel: 2",
        ),
        ({**MEGATRON, "lora": {}}, "lora is built for learner.backend: fsdp alone"),
    ],
)
def test_layouts_that_are_not_built_are_named_with_their_key(
    learner: dict[str, object], message: str
) -> None:
    with pytest.raises(ParamsError, match=rf"learner\.{message}"):
        check_supported(parse({"learner": learner}))


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (
            {"num_processes": 3, "tensor_parallel": 2},
            "num_processes must be a multiple of .* 2, got 3",
        ),
        ({"sequence_parallel": True}, "sequence_parallel splits tokens .* tensor_parallel"),
    ],
)
def test_layouts_that_do_not_add_up_are_no_params(learner: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        parse({"learner": {**MEGATRON, **learner}})


def test_megatron_is_refused_where_megatron_core_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda _: "0.14.0")
    with pytest.raises(ValueError, match=r"learner\.backend: megatron .* got 0\.14"):
        check_supported(parse({"learner": MEGATRON}))


def test_both_learners_are_supported() -> None:
    check_supported(parse({"learner": {**MEGATRON, "tensor_parallel": 2}}))


@pytest.mark.parametrize(
    ("learner", "backend", "is_refused"),
    [
        ({}, "hf", True),
        ({"precision": "bfloat16"}, "hf", False),
        ({"lora": {}}, "hf", False),
        ({"num_processes": 2}, "hf", False),
        ({"backend": "megatron"}, "hf", False),
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
