"""The Megatron learner on a GPU: `python -m pytest -m gpu tests/gpu/test_megatron_cuda.py` on a host that has one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from polyturn.policy.model import Policy
from polyturn.world import World
from tests.gpu.medium_model import (
    assert_recomputation_saves_memory,
    cosine,
    direction,
    flat,
    long_samples,
)
from tests.unit import ranks, tiny
from tests.unit.learner import scenarios
from tests.unit.learner.megatron_scenarios import (
    DP2,
    LR,
    MEGATRON,
    TP2_SP,
    Run,
    learner_of,
    run_of,
    two_pictures_each,
    whole_gradients,
)
from tests.unit.learner.scenarios import Tensors, update, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_convolutions"),
]

CUDA = torch.device("cuda")


def test_float32_gives_what_fsdp_gives() -> None:
    policy = tiny.qwen3()
    mine = learner_of(policy, device=CUDA)
    other = scenarios.learner_of(policy, device=CUDA, lr=LR)
    batch = two_pictures_each(mine.renderer)
    one, two = update(mine, batch), update(other, batch)
    assert one.loss_metrics["loss"] == pytest.approx(two.loss_metrics["loss"], rel=1e-5)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    found, wanted = whole_gradients(mine), scenarios.gradients(other)
    worst = {
        name: float((found[name] - value).norm() / value.norm().clamp(min=1e-12))
        for name, value in wanted.items()
    }
    print(f"float32: worst gradient {max(worst.values()):.1e} away from FSDP's")
    assert max(worst.values()) < 1e-3, worst


def test_bfloat16_is_as_near_to_fsdp_as_bfloat16_is(medium: Policy) -> None:
    """Loss, logprobs, gradients; then five steps the same way."""
    options = {"precision": "bfloat16", "lr": 1e-5}
    mine = learner_of(medium, device=CUDA, **options)
    other = scenarios.learner_of(medium, device=CUDA, **options)
    chosen = long_samples(mine.renderer)
    before = weights_of(other)
    gap = np.abs(np.concatenate(mine.logprobs(chosen)) - np.concatenate(other.logprobs(chosen)))
    one = update(mine, chosen, is_on_policy=True)
    two = update(other, chosen, is_on_policy=True)
    gradients = scenarios.gradients(other)
    same = direction(whole_gradients(mine), gradients)
    print(
        f"bfloat16: loss {one.loss_metrics['loss']:.5f} and FSDP {two.loss_metrics['loss']:.5f}, gradient norm "
        f"{one.grad_norm:.4f} and {two.grad_norm:.4f}, logprobs apart by {gap.mean():.4f} (most {gap.max():.3f}), "
        f"cosine of the gradients {same:.5f}"
    )
    assert gap.mean() < 0.03
    assert one.loss_metrics["loss"] == pytest.approx(two.loss_metrics["loss"], abs=0.02)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=0.03)
    assert same > 0.99
    for _ in range(4):
        update(mine, chosen)
        update(other, chosen)
    start = flat(before, before)
    # The float32 main weights of both, for steps of 1e-5 are below bfloat16's resolution of most weights.
    moved = [flat(main_weights(mine), before) - start, flat(weights_of(other), before) - start]
    print(f"cosine of the ways after five steps {cosine(*moved):.4f}")
    assert cosine(*moved) > 0.9


def main_weights(learner: object) -> Tensors:
    """The float32 weights that the optimizer steps."""
    from polyturn.learner.megatron.weights import hf_tensors  # noqa: PLC0415

    found = {
        id(parameter): part.gathered(parameter, part.slice_of(parameter).main)
        for part in learner.stepper.parts.values()  # type: ignore[attr-defined]
        for parameter in part.parameters.values()
    }
    return dict(hf_tensors(learner.model, lambda p: found[id(p)], only_trained=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_exported_is_what_was_loaded(medium: Policy, precision: str) -> None:
    learner = learner_of(medium, device=CUDA, precision=precision)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    exported = weights_of(learner)
    wanted = medium.model.state_dict()
    assert exported.keys() == wanted.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.cpu(), wanted[name].to(dtype)), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offload_frees_the_gpu_and_gives_everything_back(medium: Policy, precision: str) -> None:
    learner = learner_of(
        medium,
        device=CUDA,
        precision=precision,
        offload=True,
        freeze_vision=True,
        loss={"kl_coef": 0.1},
    )
    chosen = long_samples(learner.renderer)
    update(learner, chosen, is_on_policy=True)
    before = {name: tensor.cpu() for name, tensor in weights_of(learner).items()}
    state = learner._state.on_host()["tensors"]
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    took = learner.offload()
    freed = allocated - torch.cuda.memory_allocated()
    num_bytes = 4 * sum(p.numel() for p in learner.model.language.parameters())
    assert freed > 3 * num_bytes, (
        freed,
        num_bytes,
    )  # two moments, main weights, gradients and more
    assert learner.offload() == 0.0
    back = learner.onload()
    print(f"{precision}: offload of {freed / 1e6:.0f} MB {took:.3f} s, back {back:.3f} s")
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor.cpu(), before[name]), name
    again = learner._state.on_host()["tensors"]
    assert isinstance(state, dict)
    assert isinstance(again, dict)
    assert all(torch.equal(again[key].data, one.data) for key, one in state.items())
    assert np.isfinite(update(learner, chosen).loss_metrics["loss"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_state_written_in_the_background_continues_to_the_byte(
    tmp_path: Path, precision: str
) -> None:
    learner = learner_of(tiny.qwen3(), device=CUDA, precision=precision)
    batch = two_pictures_each(learner.renderer)
    update(learner, batch)
    write = learner.snapshot()
    thread = threading.Thread(target=write, args=(tmp_path,))
    thread.start()
    update(learner, batch)  # training goes on
    thread.join()
    wanted = weights_of(learner)
    again = learner_of(tiny.qwen3(seed=1), device=CUDA, precision=precision)
    again.load(tmp_path)
    update(again, batch)
    for name, tensor in weights_of(again).items():
        assert torch.equal(tensor, wanted[name]), name


def test_recomputed_activations_take_less_memory_for_the_same_gradients(medium: Policy) -> None:
    assert_recomputation_saves_memory(MEGATRON, medium)


def test_speed_is_printed(medium: Policy) -> None:
    for backend in ("fsdp", "megatron"):
        make = learner_of if backend == "megatron" else scenarios.learner_of
        learner = make(medium, device=CUDA, precision="bfloat16", micro_batch_tokens=16_384)
        chosen = long_samples(learner.renderer) * 4
        learner.update(chosen, lr_scale=1.0, is_on_policy=True)
        torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(3):
            stats = learner.update(chosen, lr_scale=1.0, is_on_policy=True)
        torch.cuda.synchronize()
        seconds = (time.monotonic() - started) / 3
        print(f"{backend}: {stats.num_tokens / seconds:.0f} trained tokens/s of a small model")
        assert seconds < 30


def on_two_gpus(world: World) -> dict[str, Run]:
    """The layouts of two ranks, each on its GPU."""
    torch.backends.cudnn.allow_tf32 = False
    return {
        name: run_of(
            replace(kind, layout={**kind.layout, "device": "cuda"}),
            world,
            torch.device("cuda", world.rank),
        )
        for name, kind in (("TP2 + SP", TP2_SP), ("DP2", DP2))
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    found = ranks.run("tests.gpu.test_megatron_cuda:on_two_gpus", tmp_path, timeout_s=600)
    for rank in found:
        if not isinstance(rank.outcome, dict):
            pytest.fail(f"{rank.outcome!r}\n{rank.output}")
    alone = run_of(MEGATRON, World(), CUDA)
    for name, run in found[0].outcome.items():
        assert run.loss == pytest.approx(alone.loss, rel=1e-4), name
        assert run.grad_norm == pytest.approx(alone.grad_norm, rel=1e-3), name
        assert direction(run.gradients, alone.gradients) > 0.9999, name


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """The learners' own process group ends with this module."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
