"""Compiled layers and loss on a GPU, lowered to kernels for real."""

from __future__ import annotations

import pytest
import torch

from polyturn.policy.fused import fused_scores
from polyturn.policy.logprobs import _Score
from polyturn.render import Renderer
from tests.unit import tiny
from tests.unit.learner.scenarios import gradients, learner_of, samples, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")


def test_fused_scores_of_half_precision_logits_are_those_of_the_eager_path() -> None:
    start = (4 * torch.randn(64, 5000, device=CUDA)).bfloat16()
    targets = torch.arange(64, device=CUDA) * 70
    found = []
    for run, dtype in ((_Score.apply, torch.float32), (fused_scores, torch.bfloat16)):
        logits = start.to(dtype).requires_grad_(True)
        logprobs, entropy = run(logits, targets, 0.8, [3, 140])
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append((logprobs.detach(), entropy.detach(), logits.grad.float()))
    (logprobs, entropy, gradient), (own_logprobs, own_entropy, own_gradient) = found
    # the second target is banned: its logprob is -inf on both sides
    torch.testing.assert_close(own_logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_entropy, entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-2, atol=1e-4)


@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_compiled_learner_is_as_near_to_float32_as_an_eager_one(precision: str) -> None:
    """Over several micro-batches, so that gradients add up before they are given to the optimizer."""
    policy = tiny.qwen3()
    chosen = samples(Renderer(policy))

    def of(precision: str, *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        learner = learner_of(
            policy, device=CUDA, micro_batch_tokens=90, precision=precision, compile=is_compiled
        )
        update(learner, chosen)
        return gradients(learner)

    exact, eager, compiled = of("float32"), of(precision), of(precision, is_compiled=True)
    for name, gradient in compiled.items():
        mine, theirs = distance(gradient, exact[name]), distance(eager[name], exact[name])
        # two roundings of one size: on a CPU in bfloat16 0.8 to 1.6 times as far
        assert mine < 2 * theirs + 1e-4, (name, mine, theirs)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The difference's norm over the second one's."""
    return float((one - other).norm() / (other.norm() + 1e-6))
