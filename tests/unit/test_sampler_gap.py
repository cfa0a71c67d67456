"""Sampler and learner agree on logprobs, and a run says so when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn import trajectories
from polyturn.params import Params, TrainParams
from polyturn.policy.model import Policy
from polyturn.training.checks import TrainingError, check_gap
from tests.unit import tiny
from tests.unit.loop import (
    Run,
    changed,
    loop_params,
    taught_policy,
)


@pytest.fixture
def policy() -> Policy:
    return taught_policy()


@pytest.fixture
def params() -> Params:
    return loop_params()


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_learner_scores_under_the_temperature_that_was_sampled_with(
    policy: Policy, params: Params, tmp_path: Path, temperature: float
) -> None:
    """GRPO-09 (trl #3029): logits / T on both sides, ratio 1 at the first update of every rollout."""
    warm = params.rollout.model_copy(update={"temperature": temperature})
    run = Run(tmp_path, changed(params.model_copy(update={"rollout": warm}), steps=2), policy)
    run.train()
    for metrics in run.recorder.history[:2]:
        assert metrics["train/first_ratio_error"] < 1e-3
        assert metrics["train/logprob_gap_alarm"] == 0
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-3
    loose = changed(run.params, steps=1, max_logprob_gap=100.0)
    cold = Run(tmp_path / "wrong", loose, policy)
    cold.learner_temperature = 1.0
    cold.train()
    wrong = cold.recorder.history[0]
    assert wrong["train/first_ratio_error"] > 0.1, "the check would not see a mistake"
    assert wrong["train/logprob_gap_alarm"] == 1


@pytest.mark.parametrize("old", ["sampler", "learner"])
def test_dropout_in_the_config_leaves_the_first_ratio_at_one(
    policy: Policy, params: Params, tmp_path: Path, old: str
) -> None:
    """GRPO-11 (trl #454): dropout is off in every logprob pass; samples of other lengths stand in the batch."""
    noisy = tiny.copy_of(policy)
    noisy.model.config.text_config.attention_dropout = 0.5
    for module in noisy.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    chosen = params.model_copy(
        update={"learner": params.learner.model_copy(update={"old_logprobs": old})}
    )
    run = Run(tmp_path, changed(chosen, steps=2), noisy)
    run.train()
    lengths = {
        len(record["token_ids"])
        for step in (0, 1)
        for record in trajectories.read_step(tmp_path / "trajectories", step)
    }
    assert len(lengths) > 1
    for metrics in run.recorder.history[:2]:
        assert metrics["train/first_ratio_error"] < 1e-5


@pytest.mark.parametrize(("gap", "alarm"), [(0.005, 0.0), (0.2, 1.0)])
def test_a_gap_above_the_limit_is_an_alarm(
    caplog: pytest.LogCaptureFixture, gap: float, alarm: float
) -> None:
    """GRPO-26 (slime #1411): the metric, a warning, and by option the end of the run."""
    loose = TrainParams(max_logprob_gap=0.5)
    assert check_gap(gap, loose, 3) == {"train/logprob_gap_alarm": alarm}
    assert ("step 3: sampler and learner differ by 0.200" in caplog.text) is bool(alarm)
    strict = TrainParams(max_logprob_gap=0.1)
    if alarm:
        with pytest.raises(TrainingError, match=r"more than train.max_logprob_gap 0.1"):
            check_gap(gap, strict, 3)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(TrainingError):
            check_gap(wrong, loose, 3)
