"""Training that ends early, and steps whose groups are chosen: the loop with stop rules and dynamic sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows import summary
from polyturn import grpo, layout, trajectories
from polyturn.params import Params
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.report import details
from polyturn.report.data import read_run
from polyturn.training import checkpoint
from polyturn.training.stop_rules import Stopped
from tests.unit.loop import (
    Killed,
    Run,
    Validations,
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


@dataclass(frozen=True)
class Case:
    """A rule, the step after which it ends the run, and how the reason begins."""

    rules: Mapping[str, float]
    step: int
    reason: str


PLATEAU = Case({"plateau_evals": 1}, 3, "plateau: 1 validation scores in a row")
BUDGET = Case({"max_gpu_hours": 1e-9}, 0, "gpu_hours: 0.000 spent of 1e-09")
GAP = Case({"max_logprob_gap": 1e-12, "gap_steps": 2}, 2, "gap: sampler and learner differ by")


@pytest.mark.parametrize("case", [PLATEAU, BUDGET, GAP], ids=lambda case: case.reason[:7])
def test_a_stop_rule_ends_the_run_with_the_best_policy(
    policy: Policy, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Scores 0.3 at version 0 and 0.2 at version 2; the last policy gets 0.1 and is not published."""
    monkeypatch.setattr(grpo, "validate", Validations([0.3, 0.2, 0.1]))
    run = Run(tmp_path, changed(params, stop=case.rules), policy)
    outcome = run.outcome()
    assert outcome.stopped is not None
    assert outcome.stopped.step == case.step
    assert outcome.stopped.reason.startswith(case.reason)
    assert outcome.best.version == 0
    assert run.published(outcome.best) == model.weights_digest(policy.model)
    assert [number for number, _ in run.sink.steps] == list(range(case.step + 1))
    assert "eval/accuracy" in run.recorder.history[-1]


def test_a_stop_request_ends_the_run_before_its_next_step(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    run = Run(tmp_path, params, policy)
    run.stop_request = lambda: "requested" if len(run.recorder.history) == 1 else None
    outcome = run.outcome()
    assert outcome.stopped == Stopped(1, "requested")
    assert len(run.recorder.history) == 2
    assert outcome.best.version in (0, 1)


def test_a_resumed_run_stops_where_it_would_have_stopped(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    """Killed at the step after which the rule applies, with the checkpoint of that step: no step is added."""
    rules = changed(params, stop={"max_logprob_gap": 1e-12, "gap_steps": 2})
    whole = Run(tmp_path / "whole", rules, policy).outcome()
    stopped = Run(tmp_path / "stopped", rules, policy)
    stopped.killed_after_step = 1
    with pytest.raises(Killed):
        stopped.train()
    again = Run(tmp_path / "stopped", rules, policy)
    assert again.outcome(resume=True) == whole
    assert whole.stopped is not None
    assert whole.stopped.step == 2


def test_hours_before_a_resume_count(policy: Policy, params: Params, tmp_path: Path) -> None:
    first = Run(tmp_path, changed(params, steps=2), policy)
    first.train()
    (state,) = checkpoint.states(tmp_path / "checkpoints")
    spent = state["hours"]
    assert isinstance(spent, float)
    again = Run(tmp_path, changed(params, stop={"max_gpu_hours": spent}), policy)
    outcome = again.outcome(resume=True)
    assert outcome.stopped is not None
    assert outcome.stopped.step == 2


def test_a_run_with_dynamic_sampling_trains_on_what_its_filters_keep(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    rules = {"filters": ["polyturn.group_filters:nonzero_std"], "max_rounds": 3}
    run = Run(tmp_path, changed(params, dynamic_sampling=rules), policy)
    run.train()
    for step, metrics in enumerate(run.recorder.history[:4]):
        kept = {r["group"] for r in trajectories.read_step(tmp_path / "trajectories", step)}
        assert len(kept) == metrics["rollout/dynamic_filter/groups_kept"] <= 2
        sampled = metrics["rollout/dynamic_filter/groups_sampled"]
        dropped = metrics["rollout/dynamic_filter/drop_nonzero_std"]
        assert dropped == metrics["rollout/zero_std/count"]
        assert sampled == len(kept) + dropped + metrics["rollout/dynamic_filter/drop_surplus"]


def test_a_step_none_of_whose_groups_is_kept_takes_no_update(
    policy: Policy, params: Params, tmp_path: Path
) -> None:
    rules = {"filters": ["tests.unit.training.test_collect:refuse_all"], "max_rounds": 2}
    run = Run(tmp_path, changed(params, steps=1, dynamic_sampling=rules), policy)
    run.train()
    metrics, _ = run.recorder.history
    assert metrics["train/num_updates"] == 0
    assert metrics["rollout/dynamic_filter/is_exhausted"] == 1
    assert metrics["rollout/raw_reward"] > 0, "the reward is that of all groups that were sampled"
    assert model.weights_digest(run.own.model) == model.weights_digest(policy.model)


def test_an_early_end_is_in_the_summary_and_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / layout.TRAIN_RUN
    path.parent.mkdir()
    early = {"stopped_at": 12, "stop_reason": "plateau: 3 validation scores in a row"}
    for content, shown in (({}, []), (early, ["after 12 steps, " + early["stop_reason"]])):
        path.write_text(json.dumps({"run_id": "a" * 32, **content}))
        name = "training ended early"
        assert [row.value for row in summary.read(tmp_path) if row.what == name] == shown
        facts = details.versions_of(read_run(tmp_path))
        assert [fact.value for fact in facts if fact.name == name] == shown
