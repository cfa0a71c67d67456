"""On a GPU: torch's varlen kernel attends as the padded batches do, and packed samples score as they do alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyturn.batching import collate
from polyturn.learner.scoring import score_batch
from polyturn.policy import vision
from polyturn.policy.attention import Packing, _padded, _varlen
from polyturn.policy.logprobs import HowToScore
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.types import Span, TrainingSample
from tests.unit import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SPANS = (
    Span(0, 40, 40, 57),
    Span(0, 40, 57, 200),
    Span(200, 200, 200, 201),
    Span(201, 210, 210, 340),
)


def with_gradients(kernel: object, dtype: torch.dtype, spans: tuple[Span, ...]) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    packing = Packing(spans, torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    tokens = [
        torch.randn(340, heads, 32, generator=generator).to("cuda", dtype).requires_grad_(True)
        for heads in (4, 2, 2)
    ]
    output = kernel(tokens, packing, 32**-0.5)  # type: ignore[operator]
    (output * torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in tokens if tensor.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_kernel_equals_padded_batches(dtype: torch.dtype) -> None:
    """Within the format's rounding; a float32 reference is as near to either."""
    exact = with_gradients(_padded, torch.float32, SPANS)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for kernel in (_varlen, _padded):
        for found, wanted in zip(with_gradients(kernel, dtype, SPANS), exact, strict=True):
            assert (found.float() - wanted).norm() / wanted.norm() < limit, kernel


def test_padded_batches_on_cuda_equal_those_on_cpu() -> None:
    found = with_gradients(_padded, torch.float32, SPANS)[0]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(340, heads, 32, generator=generator) for heads in (4, 2, 2)]
    wanted = _padded(tokens, Packing(SPANS, torch.device("cpu")), 32**-0.5)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)


def samples(renderer: Renderer) -> list[TrainingSample]:
    pictures = (tiny.picture(), tiny.picture(64, 32, 90))
    return [
        tiny.training_sample(renderer, 4, images=pictures[:1], seed=1),
        tiny.training_sample(renderer, 60, images=pictures[:1], seed=1),
        tiny.training_sample(renderer, 9, seed=2),
        tiny.training_sample(renderer, 30, images=pictures, seed=3),
    ]


def scores(
    policy: Policy, chosen: list[TrainingSample], *, chunk_tokens: int | None = None
) -> Tensor:
    batch = collate(chosen, [1.0] * len(chosen), Renderer(policy))
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    features = {image.sha256: made for image, made in zip(batch.images, encoded, strict=True)}
    return score_batch(policy, batch, features, 1.0, how=HowToScore(chunk_tokens)).logprobs


@torch.no_grad()
@pytest.mark.parametrize("make", [tiny.qwen3, tiny.qwen2_5])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 0.25)])
def test_packed_samples_score_as_alone_and_as_on_cpu(
    make: object, dtype: torch.dtype, limit: float
) -> None:
    policy: Policy = make()  # type: ignore[operator]
    chosen = samples(Renderer(policy))
    on_cpu = scores(policy, chosen)
    moved = replace(policy, model=copy.deepcopy(policy.model).to("cuda", dtype))
    packed = scores(moved, chosen)
    alone = torch.cat([scores(moved, [sample]) for sample in chosen])
    assert (packed - alone).abs().mean() < limit
    assert (packed.cpu() - on_cpu).abs().mean() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_equal_bytes_under_deterministic_algorithms(dtype: torch.dtype) -> None:
    """Siblings add to the gradient of their prompt's states in a fixed order."""
    policy = tiny.qwen3()
    moved = replace(policy, model=copy.deepcopy(policy.model).to("cuda", dtype))
    chosen = samples(Renderer(policy))
    found: list[list[Tensor]] = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            moved.model.zero_grad()
            scores(moved, chosen, chunk_tokens=32).sum().backward()
            gradients = [p.grad.clone() for p in moved.model.parameters() if p.grad is not None]
            found.append(gradients)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found[0]) > 20
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))
