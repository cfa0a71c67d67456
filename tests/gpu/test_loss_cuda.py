"""The loss on a GPU: `python -m pytest -m gpu tests/gpu/test_loss_cuda.py` on a host that has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from polyturn.loss import policy_loss
from polyturn.params import LossParams
from tests.reference_grpo import Padded, reference_loss
from tests.unit.loss_cases import inputs_of, name_of, padded, variants, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

VARIANTS = list(variants())


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Operations without a deterministic kernel raise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(batch: Padded) -> Padded:
    return Padded(**{field.name: getattr(batch, field.name).cuda() for field in fields(batch)})


@pytest.mark.parametrize("params", VARIANTS[::7], ids=name_of)
def test_loss_and_gradients_on_a_gpu_are_those_of_the_reference_and_equal_bytes_twice(
    params: LossParams,
) -> None:
    exact = with_gradients(padded())
    expected = reference_loss(exact, params)
    (wanted,) = torch.autograd.grad(expected, [exact.logprobs])
    found: list[torch.Tensor] = []
    for _ in range(2):
        batch = with_gradients(on_gpu(padded(dtype=torch.float32)))
        terms = policy_loss(inputs_of(batch, params), params)
        found += torch.autograd.grad(terms.loss, [batch.logprobs])
        assert terms.sums.values()["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert torch.equal(*found)
    assert float((found[0].cpu() - wanted).norm() / wanted.norm()) < 1e-5
