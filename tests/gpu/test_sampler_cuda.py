"""On a GPU: the embedded sampler gives what the CPU gives, turn for turn, and the same again."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyturn.policy.model import Policy
from polyturn.render import Renderer
from tests.unit import tiny
from tests.unit.sampler.test_hf import converse, group, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_convolutions"),
]


def on_cuda(policy: Policy) -> Policy:
    """A copy whose weights are on the GPU."""
    return replace(policy, model=copy.deepcopy(policy.model).to("cuda"))  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [tiny.qwen3, tiny.qwen2_5])
def test_three_turns_with_new_pictures_equal_those_on_the_cpu(build: object) -> None:
    policy: Policy = build()  # type: ignore[operator]
    renderer = Renderer(policy)
    requests = group(renderer)
    torch.backends.cuda.matmul.allow_tf32 = False
    here = converse(make(policy), renderer, requests)
    there = converse(make(on_cuda(policy)), renderer, requests)
    again = converse(make(on_cuda(policy)), renderer, requests)
    for cpu, cuda, second in zip(here, there, again, strict=True):
        for one, other, repeated in zip(cpu, cuda, second, strict=True):
            assert one.token_ids == other.token_ids
            assert np.abs(np.subtract(one.logprobs, other.logprobs)).max() < 1e-4
            assert repeated == other
