"""Compiled layers and losses give the numbers of the eager ones."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyturn.policy import fused
from polyturn.policy.logprobs import _Score
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from tests.unit import tiny
from tests.unit.learner.scenarios import gradients, learner_of, samples, update

BANNED = [2, 5]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions as they are written: compiling them for a CPU takes half a minute."""
    monkeypatch.setattr(fused, "compiled", lambda function: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_fused_scores_are_those_of_the_eager_path(temperature: float, with_entropy: bool) -> None:
    """The worked case has a target in each half, one banned id beside it, and logits far apart."""
    start = 20 * torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 4, 8, 3])
    found = []
    for run in (_Score.apply, fused.fused_scores):
        logits = start.clone().requires_grad_(True)
        logprobs, entropy = run(logits, targets, temperature, BANNED)
        loss = (logprobs * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum()
        (loss + 0.3 * entropy.sum() if with_entropy else loss).backward()
        found.append((logprobs.detach(), entropy.detach(), logits.grad))
    for eager, own in zip(*found, strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-5)
    assert found[1][2][:, BANNED].eq(0).all()


@pytest.mark.usefixtures("uncompiled")
def test_gradients_of_fused_scores_are_those_of_finite_differences() -> None:
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_(True)
    targets = torch.tensor([0, 4, 8])
    assert torch.autograd.gradcheck(
        lambda x: fused.fused_scores(x, targets, 0.7, BANNED),
        (logits,),
        atol=1e-2,
        rtol=1e-2,
        eps=1e-3,
    )


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_compiled_learner_gives_the_gradients_of_an_eager_one(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, is_checkpointed: bool
) -> None:
    """Traced but not lowered to kernels: that takes half a minute on a CPU (tests/gpu does it for real)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    fused.compiled.cache_clear()
    chosen = samples(Renderer(policy))
    eager = learner_of(policy, micro_batch_tokens=90)
    compiled = learner_of(
        policy, micro_batch_tokens=90, compile=True, activation_checkpointing=is_checkpointed
    )
    before, after = update(eager, chosen), update(compiled, chosen)
    fused.compiled.cache_clear()
    assert after.loss_metrics["loss"] == pytest.approx(before.loss_metrics["loss"], abs=1e-6)
    wanted = gradients(eager)
    assert wanted
    for name, gradient in gradients(compiled).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_more_pictures_in_a_micro_batch_are_no_further_graphs(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each graph of a step is seconds of compilation, and the sixteenth of a function was its last."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    fused.compiled.cache_clear()
    learner = learner_of(policy, compile=True)
    pictures = [tiny.picture(32, 48, 7 * number) for number in range(6)]
    graphs = []
    for count in (2, 3, 4, 6):
        sample = tiny.training_sample(
            learner.renderer, 20, images=tuple(pictures[:count]), advantage=1.0
        )
        update(learner, [sample], is_on_policy=True)
        graphs.append(counter.frame_count)
    fused.compiled.cache_clear()
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4
