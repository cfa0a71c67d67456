"""The token cases that other tests do not hold already, and that every case is named by a test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams, LossParams
from polyturn.policy.model import Policy
from polyturn.policy.positions import mrope_positions
from polyturn.render import Rendered, Renderer
from polyturn.sampler.base import Reply
from polyturn.samples import with_gradient
from polyturn.stream import TokenStream
from polyturn.training.metrics import rollout_metrics
from polyturn.types import Group, TokenCounts, TrainingSample
from tests.unit import tiny
from tests.unit.training.test_turn_metrics import trajectory

TESTS = Path(__file__).parent
CASES = TESTS.parent.parent.parent / "shared" / "cases" / "e_tokens.jsonl"


@pytest.mark.skipif(not CASES.is_file(), reason="../shared/cases is not here")
def test_every_case_is_named_by_a_test() -> None:
    ids = {json.loads(line)["id"] for line in CASES.read_text().splitlines() if line.strip()}
    named = {
        case
        for path in TESTS.rglob("test_*.py")
        for case in re.findall(r"TOK-\d\d", path.read_text())
    }
    assert len(ids) > 10
    assert ids <= named, sorted(ids - named)


def masked_out(sample: TrainingSample) -> TrainingSample:
    """The same tokens, none of them trained."""
    return TrainingSample(
        sample.token_ids,
        np.zeros_like(sample.loss_mask),
        np.zeros_like(sample.logprobs),
        sample.images,
        advantage=sample.advantage,
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("num_masked", [1, 4])
def test_samples_without_a_trained_token_give_no_nan(
    policy: Policy, renderer: Renderer, num_masked: int, aggregation: str
) -> None:
    """TOK-15: one of four masks, or all four, are zero (NeMo-RL #158)."""
    own = tiny.copy_of(policy)
    learner = FsdpLearner(
        own,
        renderer,
        LearnerParams(freeze_vision=True),
        LossParams.model_validate({"aggregation": aggregation}),
        1.0,
    )
    samples = [tiny.training_sample(renderer, 5, seed=seed) for seed in range(4)]
    samples = [masked_out(s) if i < num_masked else s for i, s in enumerate(samples)]
    before = [parameter.detach().clone() for parameter in own.model.parameters()]
    stats = learner.update(samples, lr_scale=1.0, is_on_policy=True)
    assert np.isfinite([stats.grad_norm, *stats.loss_metrics.values()]).all()
    moved = any((a != b).any() for a, b in zip(before, own.model.parameters(), strict=True))
    assert moved is (num_masked < 4)
    assert stats.num_tokens == 5 * (4 - num_masked)


def test_trajectories_without_a_sampled_token_are_counted_and_left_out() -> None:
    """TOK-15: the metric tells how many; they are in no update."""
    empty, full = trajectory(reward=0.0), trajectory("12")
    metrics = rollout_metrics([Group(0, (empty, full, empty))], seed=0)
    assert metrics["rollout/fully_masked/count"] == 2.0
    assert with_gradient([Group(0, (empty, full))], [[-1.0, 1.0]])[0].advantage == 1.0


@pytest.mark.parametrize(("pad", "image"), [(3, 7), (7, 3), (0, 1)])
def test_padding_is_no_picture_whatever_the_ids_are(pad: int, image: int) -> None:
    """TOK-24: pad_token_id 3, image_token_id 7 (lmdeploy #3285)."""
    ids = np.array([10, image, image, 11, pad, pad])
    positions = mrope_positions(ids, image, [(1, 2)])
    assert positions[0].tolist() == [0, 1, 1, 3, 4, 5]
    stream = TokenStream()
    stream.append(Rendered((10, image, 11), (10, image, image, 11), (tiny.picture(),)))
    stream.take(Reply((pad, 12), (-1.0, -1.0), "stop", 4, 0))
    assert stream.counts(image) == TokenCounts(prompt=2, assistant=2, image_pads=2)
