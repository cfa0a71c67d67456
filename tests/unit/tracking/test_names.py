"""Names and values that MLflow refuses, or would keep as something else."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

from polyturn.params import TrackingParams
from polyturn.tracking import names, open_run

TRACKING = TrackingParams(system_metrics_s=0)
REFUSED = (
    "timing(s)/gen", "val/AR@100", "acc, greedy", "huber[delta=1.3]", "50%", "größe ≤ 3", "/lead", "a//b", "a/../b", "a/",
    ".", "..", "", "a\nb", "x" * 251, "é" * 300,
)  # fmt: skip


def test_every_name_is_one_that_mlflow_accepts():
    """verl-project/verl#119, open-mmlab/mmdetection#10258, mlflow/mlflow#7807: a name ended the training."""
    for name in REFUSED:
        for check in (_validate_metric_name, _validate_param_name, _validate_tag_name):
            check(names.accepted(name))
    kept = ("rollout/raw_reward", "learner.lr", "system/gpu: 0", "größe-1 b")
    assert [names.accepted(name) for name in kept] == list(kept)


def test_long_names_that_differ_at_their_end_stay_two():
    first, second = (names.accepted("x" * 260 + end) for end in "ab")
    assert first != second
    assert len(first) == len(second) == 250


def test_names_of_plugins_end_no_run(project: Path):
    """What a user's environment or data call their metrics, params and tags."""
    with open_run(TRACKING, root=project, name="train") as run:
        run.log_metrics(dict.fromkeys(REFUSED, 1.0), 1)
        run.log_params({"env": {"params": {"size(px)": 48, "a=b": "c"}}})
        run.set_tags({"why?": "x"})
    stored = run.store.client.get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.metrics["timing_s_/gen"] == 1.0
    assert stored.data.params == {"env.params.size_px_": "48", "env.params.a_b": "c"}
    assert stored.data.tags["why_"] == "x"


def test_an_infinite_metric_is_told_once_and_is_no_large_number(
    project: Path, caplog: pytest.LogCaptureFixture
):
    """mlflow/mlflow#22826: inf is stored as 1.8e308, and nothing says so."""
    with open_run(TRACKING, root=project, name="train") as run, caplog.at_level(logging.WARNING):
        for step in (1, 2):
            run.log_metrics({"grad_norm": math.inf, "kl": -math.inf, "gap": math.nan, "loss": 2}, step)  # fmt: skip
    assert run.store.client.get_run(run.run_id).data.metrics == {"loss": 2.0}
    told = [record.getMessage() for record in caplog.records]
    assert told == ["step 1: grad_norm, kl is infinite; MLflow does not get such values"]


def test_a_value_that_is_cut_says_so_and_differs_from_others_of_its_beginning(project: Path):
    """mlflow/mlflow#10512: a param that is too long; two that are equal up to the cut would look the same in a comparison."""
    with open_run(TRACKING, root=project, name="train") as run:
        run.log_params({"a": "x" * 7000 + "a", "b": "x" * 7000 + "b", "short": "y" * 6000})
        run.set_tags({"error.message": "z" * 9000})
    data = run.store.client.get_run(run.run_id).data
    assert data.params["short"] == "y" * 6000
    assert len(data.params["a"]) == len(data.params["b"]) == 6000
    assert data.params["a"] != data.params["b"]
    assert "... (7001 characters, sha256 " in data.params["a"][-60:]
    assert "... (9000 characters, sha256 " in data.tags["error.message"][-60:]
