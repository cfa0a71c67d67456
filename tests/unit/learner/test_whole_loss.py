"""The learner with every term of the loss at work, against the float64 reference on the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from polyturn.learner.base import Logprobs
from polyturn.params import LossParams
from polyturn.policy.model import Policy
from polyturn.policy.vision import PatchReader
from polyturn.render import Renderer
from polyturn.types import TrainingSample
from tests.reference_grpo import Padded, reference_loss
from tests.unit import tiny
from tests.unit.learner.scenarios import gradients, learner_of, samples, update

TERMS = {
    "token": LossParams(
        dual_clip=1.5, kl_coef=0.3, entropy_coef=0.1, tis_mode="token_truncate", tis_clip=1.2
    ),
    "sequence": LossParams(
        ratio_level="sequence",
        clip_low=0.02,
        clip_high=0.02,
        aggregation="sequence_mean",
        kl_coef=0.5,
        kl_estimator="k2",
        tis_mode="sequence_mask",
    ),
    "cispo": LossParams(
        surrogate="cispo",
        aggregation="constant",
        constant_divisor=20,
        kl_coef=0.2,
        kl_estimator="k1",
        entropy_coef=0.2,
        tis_mode="token_mask",
        tis_clip=1.2,
        tis_clip_low=0.8,
    ),
}


def scored(policy: Policy, sample: TrainingSample) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the trained tokens, by the model's own forward on this sample alone, in float64."""
    read = [PatchReader(policy).read(image) for image in sample.images]
    shown: dict[str, Tensor] = {}
    if read:
        shown["pixel_values"] = torch.cat([patches for patches, _ in read])
        shown["image_grid_thw"] = torch.stack([grid for _, grid in read])
    ids = torch.from_numpy(sample.token_ids)[None]
    logits = policy.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == policy.family.image_token_id).int(),
        **shown,
    ).logits[0]
    before = torch.from_numpy(np.flatnonzero(sample.loss_mask) - 1)
    allowed = torch.ones(logits.shape[-1], dtype=torch.bool)
    allowed[list(policy.family.banned_ids)] = False
    rows = logits[before].double().masked_fill(~allowed, -torch.inf).log_softmax(-1)
    entropy = -(rows[:, allowed].exp() * rows[:, allowed]).sum(-1)
    return rows.gather(-1, ids[0, before + 1, None])[:, 0], entropy


def padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)


def trained(samples: Sequence[TrainingSample], values: Sequence[Logprobs]) -> Tensor:
    """Numbers of the trained tokens, [B, T] with T the most of them."""
    pairs = zip(samples, values, strict=True)
    return padded([torch.from_numpy(value[sample.loss_mask == 1]) for sample, value in pairs])


@pytest.mark.parametrize("name", TERMS)
def test_a_later_update_has_the_gradients_of_the_reference(name: str, policy: Policy) -> None:
    """The second update of a rollout: policy, old policy, sampler and reference are four different things."""
    loss = TERMS[name]
    learner = learner_of(policy, loss=loss, lr=3e-3, micro_batch_tokens=150)
    chosen = samples(Renderer(policy))
    noise = np.random.default_rng(0)
    start = learner.logprobs(chosen)
    update(learner, chosen, old_logprobs=start)
    old = learner.logprobs(chosen)
    chosen = [
        replace(
            sample,
            logprobs=(own + sample.loss_mask * noise.normal(0, 0.15, len(own))).astype(np.float32),
        )
        for sample, own in zip(chosen, old, strict=True)
    ]
    update(learner, chosen, old_logprobs=old)
    present = tiny.copy_of(learner.policy)
    stats = update(learner, chosen, old_logprobs=old)
    found = gradients(learner)

    scores = [scored(present, sample) for sample in chosen]
    batch = Padded(
        logprobs=padded([logprobs for logprobs, _ in scores]),
        old=trained(chosen, old),
        sampler=trained(chosen, [sample.logprobs for sample in chosen]),
        reference=trained(chosen, start),
        entropy=padded([entropy for _, entropy in scores]),
        mask=padded([torch.ones(len(logprobs)) for logprobs, _ in scores]),
        advantages=torch.tensor([sample.advantage for sample in chosen], dtype=torch.float64),
    )
    expected = reference_loss(batch, loss)
    expected.backward()
    metrics = stats.loss_metrics
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["ref_logprob_abs_diff"] > 0.05
    assert metrics["ratio_error"] > 0.01
    assert metrics["tis_abs"] > 0.05
    assert metrics["pg_clipfrac"] > 0
    wanted = {n: p.grad for n, p in present.model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        error = (found[parameter] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-3, parameter
