"""The loss's terms and checks in runs of the training loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from polyturn import params as params_module
from polyturn.params import Params
from polyturn.training.checks import TrainingError
from tests.unit.loop import Run, loop_params, taught_policy

EVERYTHING = {
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "tis_mode": "token_truncate",
    "dual_clip": 3.0,
}


def params_of(loss: dict[str, object], **sections: dict[str, object]) -> Params:
    """Those of the loop's tests with two steps and other values."""
    tree = loop_params().model_dump()
    tree["train"]["steps"] = 2
    for section, values in {"loss": loss, **sections}.items():
        tree[section] |= values
    return params_module.parse(tree)


def train(run: Run) -> list[dict[str, float]]:
    run.train()
    return [dict(metrics) for metrics in run.recorder.history[:2]]


def test_every_term_is_at_work_and_a_run_starts_at_ratio_1_and_kl_0(tmp_path: Path) -> None:
    """One update per rollout: step 0 is the reference, its ratios are 1 and its sampler is corrected by nothing."""
    params = params_of(EVERYTHING, train={"updates_per_rollout": 1})
    first, second = train(Run(tmp_path, params, taught_policy()))
    assert first["train/ratio_error_max"] == second["train/ratio_error_max"] == 0.0
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-8)
    assert first["train/ref_logprob_abs_diff_max"] < 1e-4
    assert second["train/kl_loss"] > 1e-6
    for metrics in (first, second):
        assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["train/tis_clipfrac"] == 0.0
        assert metrics["train/entropy_loss"] > 0
        assert all(math.isfinite(value) for value in metrics.values())


def test_several_updates_start_at_the_learners_own_old_logprobs(tmp_path: Path) -> None:
    params = params_of(
        EVERYTHING, train={"updates_per_rollout": 2}, learner={"old_logprobs": "learner"}
    )
    for metrics in train(Run(tmp_path, params, taught_policy())):
        assert metrics["train/first_ratio_error"] < 1e-5
        assert metrics["train/ratio_error_max"] > 1e-3  # of the second update
        assert metrics["train/tis_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("loss", "updates"), [({}, 0), ({"entropy_coef": 0.01}, 2)])
def test_equal_rewards_are_trained_on_only_for_the_sake_of_other_terms(
    loss: dict[str, object], updates: int, tmp_path: Path
) -> None:
    params = params_of(
        loss,
        reward={"terms": [{"term": "tests.unit.loop:nothing"}]},
        train={"updates_per_rollout": 2},
    )
    for metrics in train(Run(tmp_path, params, taught_policy())):
        assert metrics["train/num_updates"] == updates
        assert metrics.get("train/pg_loss", 0.0) == 0.0
        assert metrics["rollout/zero_std/count"] == 2


def test_a_reference_of_other_weights_stops_the_run_at_its_first_step(tmp_path: Path) -> None:
    params = params_of({"kl_coef": 0.1}, train={"updates_per_rollout": 1})
    run = Run(tmp_path, params, taught_policy())
    parts = run.parts

    def with_another_reference():
        made = parts()
        reference = run.learner._reference
        assert reference is not None
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in reference.scorer.policy.model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        return made

    run.parts = with_another_reference  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"step 0: policy and reference must be equal"):
        run.train()


def test_old_logprobs_of_other_weights_stop_the_run(tmp_path: Path) -> None:
    params = params_of({}, train={"updates_per_rollout": 2}, learner={"old_logprobs": "learner"})
    run = Run(tmp_path, params, taught_policy())
    parts = run.parts

    def with_stale_logprobs():
        made = parts()
        logprobs = made.learner.logprobs
        made.learner.logprobs = lambda samples: [own - 0.3 for own in logprobs(samples)]
        return made

    run.parts = with_stale_logprobs  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"step 0: ratios before a rollout's first update"):
        run.train()
