"""Learner states: what they hold, what does not fit, what happens on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from polyturn.learner.state import StateError
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from tests.unit import tiny
from tests.unit.learner.scenarios import Tensors, learner_of, samples, update, weights_of

LORA = {"rank": 2, "target_modules": ["q_proj"]}


def names_in(directory: Path) -> set[str]:
    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


def test_saved_state_holds_moments_and_continues_as_if_never_stopped(
    policy: Policy, renderer: Renderer, tmp_path: Path
) -> None:
    """Three steps, save, a fourth; the fourth again from the files (CodefyUI #147)."""
    steady, chosen = learner_of(policy), samples(renderer)
    for _ in range(3):
        update(steady, chosen)
    steady.save(tmp_path)
    names = {name for name, _ in policy.model.named_parameters()}
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert names_in(tmp_path) == {
        "num_ranks",
        *(f"model/{name}" for name in names),
        *(f"optimizer/{name}/{kind}" for name in names for kind in kinds),
    }
    resumed = learner_of(tiny.qwen3(seed=1))
    resumed.load(tmp_path)
    moments = resumed._optimizer.state.values()
    assert all(entry["step"] == 3 and entry["exp_avg_sq"].any() for entry in moments)
    update(steady, chosen)
    update(resumed, chosen)
    wanted: Tensors = weights_of(steady)
    assert all(torch.equal(value, wanted[name]) for name, value in weights_of(resumed).items())


def test_a_state_from_before_the_first_step_continues_like_a_new_run(
    policy: Policy, renderer: Renderer, tmp_path: Path
) -> None:
    fresh, chosen = learner_of(policy, weight_decay=0.1), samples(renderer)
    fresh.save(tmp_path)
    again, never_saved = learner_of(policy, weight_decay=0.1), learner_of(policy, weight_decay=0.1)
    again.load(tmp_path)
    for learner in (fresh, again, never_saved):
        update(learner, chosen)
    wanted = weights_of(never_saved)
    for learner in (fresh, again):
        assert all(torch.equal(value, wanted[name]) for name, value in weights_of(learner).items())


def test_with_adapters_only_these_are_saved(
    policy: Policy, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(policy, lora=LORA)
    update(learner, samples(renderer))
    learner.save(tmp_path)
    assert all("lora_" in name for name in names_in(tmp_path) - {"num_ranks"})
    again = learner_of(policy, lora=LORA, seed=5)
    again.load(tmp_path)
    wanted = weights_of(learner)
    assert all(torch.equal(value, wanted[name]) for name, value in weights_of(again).items())


def test_a_state_that_does_not_fit_is_refused_by_the_names_of_its_tensors(
    policy: Policy, policy_2_5: Policy, tmp_path: Path
) -> None:
    learner_of(policy).save(tmp_path)
    frozen = learner_of(policy, freeze_vision=True)
    with pytest.raises(StateError, match=r"unknown: optimizer/model.visual\.\S+/exp_avg,"):
        frozen.load(tmp_path)
    with pytest.raises(StateError, match=r"missing: model/model.*unknown: model/"):
        learner_of(policy_2_5).load(tmp_path)
    wider = tiny.qwen3(tiny.SMALL.model_copy(update={"intermediate_size": 160}))
    before = weights_of(learner := learner_of(wider))
    with pytest.raises(StateError, match=r"18 of another shape: model/model.language_model\S+mlp"):
        learner.load(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_full_disk_is_told_as_what_it_is(policy: Policy, tmp_path: Path, is_late: bool) -> None:
    learner = learner_of(policy)
    write = learner.snapshot() if is_late else learner.save
    with tiny.full_disk(100_000), pytest.raises(OSError, match="File too large"):
        write(tmp_path)
