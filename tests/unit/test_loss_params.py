"""Params of the loss: settings that contradict each other or would do nothing are refused, with the fix."""

from __future__ import annotations

import pytest

from polyturn import params
from polyturn.params import ParamsError


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"loss": {"aggregation": "token_mean", "constant_divisor": 8}}, "meaningless without, got aggregation 'token_mean', constant_divisor 8"),
        ({"loss": {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_std": False}}, "without a deviation it is advantage_estimator: grpo"),
        ({"loss": {"surrogate": "cispo", "dual_clip": 3.0}}, "dual_clip 3.0 bounds surrogate: clip"),
        ({"loss": {"tis_mode": "token_mask"}, "train": {"updates_per_rollout": 2}}, "set learner.old_logprobs: learner"),
        ({"loss": {"kl_coef": -0.1}}, "loss.kl_coef: Input should be greater than or equal to 0"),
        ({"loss": {"kl_estimator": "k4"}}, "loss.kl_estimator: Input should be 'k1', 'k2' or 'k3'"),
        ({"loss": {"tis_clip": 0.5}}, "loss.tis_clip: Input should be greater than or equal to 1"),
        ({"loss": {"tis_clip_low": 1.5}}, "loss.tis_clip_low: Input should be less than or equal to 1"),
        ({"loss": {"dual_clip": 1.0}}, "loss.dual_clip: Input should be greater than 1"),
        ({"reward": {"terms": [{"term": "polyturn.reward:soft_overlong_punishment"}]}}, "overlong holds the lengths of the term"),
        ({"reward": {"overlong": {"max_tokens": 10, "buffer_tokens": 5}}}, "meaningless without"),
        ({"reward": {"overlong": {"max_tokens": 10, "buffer_tokens": 11}}}, "buffer_tokens 11 must not exceed max_tokens 10"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError) as caught:
        params.parse(tree)
    assert message in str(caught.value)


def test_a_correction_needs_old_logprobs_of_the_learner() -> None:
    """One update per rollout has them; several have them on request."""
    loss = {"tis_mode": "token_truncate"}
    params.parse({"loss": loss, "train": {"updates_per_rollout": 1}})
    params.parse(
        {
            "loss": loss,
            "train": {"updates_per_rollout": 4},
            "learner": {"old_logprobs": "learner"},
        }
    )
