"""The Megatron learner by itself: schedule, frozen towers, references, offloading, states that do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from polyturn.learner.megatron.learner import MegatronLearner
from polyturn.learner.state import StateError
from polyturn.params import Params, parse
from polyturn.render import Renderer
from polyturn.world import World
from tasks.learners import open_learner
from tests.unit import ranks, tiny
from tests.unit.learner import scenarios
from tests.unit.learner.megatron_scenarios import TP2, learner_of
from tests.unit.learner.scenarios import (
    Tensors,
    assert_refuses_to_work,
    samples,
    update,
    weights_of,
)


def changed(learner: MegatronLearner, before: Tensors) -> set[str]:
    """Names of the weights that are other than `before`."""
    after = weights_of(learner)
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def test_params_choose_the_learner() -> None:
    policy = tiny.copy_of(tiny.qwen3())
    params: Params = parse({"learner": {"backend": "megatron"}})
    learner = open_learner(policy, Renderer(policy), params, torch.device("cpu"))
    assert isinstance(learner, MegatronLearner)
    assert not learner.shares_weights


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_the_schedule_scales_steps_and_decay_as_with_fsdp(weight_decay: float) -> None:
    """Decoupled decay of every weight, norms and biases too."""
    policy = tiny.qwen3()
    mine = learner_of(policy, weight_decay=weight_decay, eps=1e-6)
    other = scenarios.learner_of(policy, weight_decay=weight_decay, eps=1e-6)
    chosen = samples(mine.renderer)
    for scale in (0.1, 1.0):
        stats = [one.update(chosen, lr_scale=scale, is_on_policy=True) for one in (mine, other)]
        assert stats[0].lr == stats[1].lr == 1e-3 * scale
    wanted = dict(other.export_weights())
    for name, tensor in weights_of(mine).items():
        assert float((tensor - wanted[name]).abs().max()) < 1e-5, name


def test_adapters_are_refused_and_what_does_nothing_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        ValueError, match=r"learner\.lora is built for learner\.backend: fsdp alone"
    ):
        learner_of(tiny.qwen3(), lora={})
    learner_of(tiny.qwen3(), reshard_after_forward=False)
    assert "learner.reshard_after_forward does nothing" in caplog.text


def test_a_frozen_tower_keeps_its_weights_and_is_no_part_of_a_state(tmp_path: Path) -> None:
    learner = learner_of(tiny.qwen3(), freeze_vision=True)
    before = weights_of(learner)
    update(learner, samples(learner.renderer))
    found = changed(learner, before)
    assert found
    assert not any("visual" in name for name in found)
    learner.save(tmp_path)
    names = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert not any("visual" in name for name in names)


def test_a_state_holds_weights_and_moments_of_everything_that_is_trained(tmp_path: Path) -> None:
    learner = learner_of(tiny.qwen3())
    for _ in range(3):
        update(learner, samples(learner.renderer))
    learner.save(tmp_path)
    held = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    number = sum(p.numel() for _, p in tiny.qwen3().model.named_parameters())
    for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
        sizes = [
            v.size.numel() for k, v in held.items() if k.startswith(f"optimizer.state.{kind}.")
        ]
        assert sum(sizes) == number, kind
    assert [part.num_steps for part in learner.stepper.parts.values()] == [3, 3]


def test_a_state_from_before_the_first_step_continues_like_a_new_run(tmp_path: Path) -> None:
    fresh, never_saved = (learner_of(tiny.qwen3(), weight_decay=0.1) for _ in range(2))
    fresh.save(tmp_path)
    again = learner_of(tiny.qwen3(seed=1), weight_decay=0.1)
    again.load(tmp_path)
    chosen = samples(fresh.renderer)
    for learner in (fresh, again, never_saved):
        update(learner, chosen)
    wanted = weights_of(never_saved)
    assert not changed(fresh, wanted)
    assert not changed(again, wanted)


def test_bfloat16_continues_to_the_byte_from_its_float32_weights(tmp_path: Path) -> None:
    """Steps of 1e-5 are below bfloat16's resolution of most weights: rounded ones would lose them."""
    steady = learner_of(tiny.qwen3(), precision="bfloat16", lr=1e-5)
    chosen = samples(steady.renderer)
    for _ in range(3):
        update(steady, chosen)
    steady.save(tmp_path)
    again = learner_of(tiny.qwen3(seed=1), precision="bfloat16", lr=1e-5)
    again.load(tmp_path)
    for learner in (steady, again):
        for _ in range(30):
            update(learner, chosen)
    assert not changed(again, weights_of(steady))


def test_a_state_that_does_not_fit_is_refused_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    learner_of(tiny.qwen3()).save(tmp_path)
    with pytest.raises(StateError, match=r"unknown: optimizer\.state\.exp_avg\.visual\S+,"):
        learner_of(tiny.qwen3(), freeze_vision=True).load(tmp_path)
    with pytest.raises(StateError, match=r"missing: optimizer\.state\.\S+qkv\.bias, .* unknown"):
        learner_of(tiny.qwen2_5()).load(tmp_path)
    wider = tiny.qwen3(tiny.SMALL.model_copy(update={"intermediate_size": 160}))
    learner = learner_of(wider)
    before = weights_of(learner)
    with pytest.raises(StateError, match=r"6 of another shape: optimizer\.state\S+linear_fc1"):
        learner.load(tmp_path)
    assert not changed(learner, before)


def test_a_state_of_fsdp_is_refused(tmp_path: Path) -> None:
    scenarios.learner_of(tiny.qwen3()).save(tmp_path)
    with pytest.raises(StateError, match=r"missing: optimizer\.state.* unknown: model/"):
        learner_of(tiny.qwen3()).load(tmp_path)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_full_disk_is_told_as_what_it_is(tmp_path: Path, is_late: bool) -> None:
    learner = learner_of(tiny.qwen3())
    write = learner.snapshot() if is_late else learner.save
    with tiny.full_disk(100_000), pytest.raises(OSError, match="File too large"):
        write(tmp_path)


def test_memory_that_is_away_is_not_used_and_comes_back_as_it_was() -> None:
    learner = learner_of(tiny.qwen3(), loss={"kl_coef": 0.1})
    other = learner_of(tiny.qwen3(), loss={"kl_coef": 0.1})
    chosen = samples(learner.renderer)
    for one in (learner, other):
        update(one, chosen)
    weight = learner.model.language.embedding.word_embeddings.weight
    learner._memory.free()
    assert_refuses_to_work(learner)
    assert weight.untyped_storage().nbytes() == 0
    assert weight.main_grad.untyped_storage().nbytes() == 0
    assert learner.onload() > 0
    for one in (learner, other):
        update(one, chosen)
    assert not changed(learner, weights_of(other))


def test_offload_without_a_gpu_is_told(caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(tiny.qwen3(), offload=True)
    assert "learner.offload: true does nothing on cpu" in caplog.text
    assert learner.offload() == learner.onload() == 0.0


def fall_out(world: World) -> None:
    """Rank 1 dies inside an update, in which rank 0 waits for it."""
    learner = learner_of(tiny.qwen3(), world=world, **TP2.layout)
    if world.rank == 1:
        learner.model.language.decoder.final_layernorm.register_forward_hook(lambda *_: os._exit(7))
    update(learner, samples(learner.renderer))


def test_a_rank_that_dies_is_noticed_by_those_that_wait_for_it(tmp_path: Path) -> None:
    from tasks.ranks import _is_lost_peer  # noqa: PLC0415

    first, second = ranks.run("tests.unit.learner.test_megatron_learner:fall_out", tmp_path)
    assert second.exit_code == 7
    assert isinstance(first.outcome, Exception), first.output
    assert _is_lost_peer(first.outcome), first.outcome
