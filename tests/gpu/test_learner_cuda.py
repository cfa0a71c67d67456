"""The learner on a GPU: `python -m pytest -m gpu tests/gpu/test_learner_cuda.py` on a host that has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn.policy import attention
from polyturn.policy.model import Policy
from polyturn.world import ONE, World
from tests.gpu.medium_model import assert_recomputation_saves_memory, direction, long_samples
from tests.unit import ranks, tiny
from tests.unit.learner.scenarios import (
    FSDP,
    LORA,
    SCENARIOS,
    Outcome,
    Tensors,
    gradients,
    learner_of,
    outcome_of,
    samples,
    update,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_convolutions"),
]

CUDA = torch.device("cuda")
ON_TWO = (
    "trained tower",
    "a rank without samples",
    "text on one rank, pictures on the other",
    "frozen tower and reference",
    "adapters in both towers",
    "bfloat16",
)


def relative(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Norm of the difference over the norm, by tensor."""
    assert found.keys() == wanted.keys()
    return {
        name: float(
            (found[name].cpu().double() - value.cpu().double()).norm()
            / value.double().norm().clamp(min=1e-12)
        )
        for name, value in wanted.items()
    }


@pytest.mark.parametrize("build", [tiny.qwen3, tiny.qwen2_5])
def test_float32_gives_what_the_cpu_gives(build: Callable[[], Policy]) -> None:
    policy = build()
    found: list[tuple[float, Tensors, np.ndarray]] = []
    for device in (torch.device("cpu"), CUDA):
        learner = learner_of(policy, device=device)
        chosen = samples(learner.renderer)
        logprobs = np.concatenate(learner.logprobs(chosen))
        stats = update(learner, chosen, is_on_policy=True)
        found.append((stats.loss_metrics["loss"], gradients(learner), logprobs))
    (loss, wanted, logprobs), (cuda_loss, cuda_gradients, cuda_logprobs) = found
    assert cuda_loss == pytest.approx(loss, rel=1e-5)
    assert np.abs(cuda_logprobs - logprobs).max() < 1e-4
    worst = relative(cuda_gradients, wanted)
    assert max(v for n, v in worst.items() if not n.endswith("k_proj.bias")) < 1e-3, worst


def test_bfloat16_is_close_to_float32_and_keeps_float32_weights(medium: Policy) -> None:
    found: list[tuple[Tensors, np.ndarray]] = []
    for precision in ("float32", "bfloat16"):
        learner = learner_of(medium, device=CUDA, precision=precision, lr=1e-5)
        chosen = long_samples(learner.renderer)
        before = weights_of(learner)
        logprobs = np.concatenate(learner.logprobs(chosen))
        update(learner, chosen, is_on_policy=True)
        after = weights_of(learner)
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        # Steps of 1e-5 are below bfloat16's resolution of most weights: they are not lost.
        moved = [(after[n] != before[n]).float().mean() for n in before if "norm" not in n]
        assert float(torch.stack(moved).mean()) > 0.9
        found.append((gradients(learner), logprobs))
    (exact, logprobs), (rounded, half_logprobs) = found
    assert np.abs(half_logprobs - logprobs).mean() < 0.03
    assert direction(rounded, exact) > 0.99


def test_varlen_attention_equals_sdpa(medium: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bfloat16 learner with torch's varlen kernel and with right padded SDPA."""
    found: list[tuple[Tensors, np.ndarray]] = []
    calls: list[int] = []
    varlen = attention._varlen

    def counted(*arguments: object) -> object:
        calls.append(1)
        return varlen(*arguments)  # type: ignore[arg-type]

    for kernel in (counted, attention._padded):
        monkeypatch.setattr(attention, "_varlen", kernel)
        learner = learner_of(medium, device=CUDA, precision="bfloat16", lr=1e-5)
        chosen = long_samples(learner.renderer)
        logprobs = np.concatenate(learner.logprobs(chosen))
        update(learner, chosen, is_on_policy=True)
        found.append((gradients(learner), logprobs))
    assert calls, "bfloat16 on a GPU did not take the varlen kernel"
    (one, logprobs), (two, other_logprobs) = found
    assert np.abs(other_logprobs - logprobs).mean() < 0.02
    assert direction(one, two) > 0.995


def test_recomputed_activations_take_less_memory_for_the_same_gradients(medium: Policy) -> None:
    assert_recomputation_saves_memory(FSDP, medium)


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
    learner._optimizer.zero_grad(set_to_none=True)
    before, held = weights_of(learner), {}
    for name, parameter in learner.parameters.items():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            held[name, key] = value.clone()
    before = {name: tensor.cpu() for name, tensor in before.items()}
    num_bytes = sum(
        tensor.nbytes for tensor in {id(t): t for t in learner.parameters.values()}.values()
    )
    allocated = torch.cuda.memory_allocated()
    took = learner.offload()
    freed = allocated - torch.cuda.memory_allocated()
    assert freed > 2 * num_bytes, (freed, num_bytes)  # weights, two moments, and the reference
    assert learner.offload() == 0.0
    back = learner.onload()
    print(
        f"offload of {freed / 1e6:.0f} MB: {took:.3f} s, back {back:.3f} s (first time, pins memory)"
    )
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor.cpu(), before[name]), name
    for name, parameter in learner.parameters.items():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            assert bool((value == held[name, key]).all()), (name, key)
    again = learner.offload() + learner.onload()
    print(f"second time, out and back: {again:.3f} s")
    assert np.isfinite(update(learner, chosen).loss_metrics["loss"])


def test_adapters_train_and_merge_in_bfloat16(medium: Policy) -> None:
    learner = learner_of(
        medium,
        device=CUDA,
        precision="bfloat16",
        freeze_vision=True,
        lora={**LORA, "rank": 8},
        loss={"kl_coef": 0.1},
    )
    chosen = long_samples(learner.renderer)
    before = weights_of(learner)
    first = update(learner, chosen, is_on_policy=True)
    second = update(learner, chosen, is_on_policy=True)
    assert first.loss_metrics["ref_logprob_abs_diff_max"] == 0.0
    assert second.loss_metrics["kl_loss"] > 0
    changed = {n for n, tensor in weights_of(learner).items() if not torch.equal(tensor, before[n])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {
        "q_proj",
        "down_proj",
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_saved_state_and_a_snapshot_come_back_to_the_byte(tmp_path: Path, precision: str) -> None:
    learner = learner_of(tiny.qwen3(), device=CUDA, precision=precision)
    chosen = samples(learner.renderer)
    update(learner, chosen)
    wanted = weights_of(learner)
    write = learner.snapshot()
    saved, late = tmp_path / "saved", tmp_path / "late"
    saved.mkdir()
    late.mkdir()
    learner.save(saved)
    update(learner, chosen)
    write(late)
    for directory in (saved, late):
        again = learner_of(tiny.qwen3(seed=1), device=CUDA, precision=precision)
        again.load(directory)
        found = weights_of(again)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        steps = {float(state["step"]) for state in again._optimizer.state.values()}
        assert steps == {1.0}


def test_speed_is_printed(medium: Policy) -> None:
    learner = learner_of(medium, device=CUDA, precision="bfloat16", micro_batch_tokens=16_384)
    chosen = long_samples(learner.renderer) * 4
    update(learner, chosen, is_on_policy=True)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(3):
        stats = update(learner, chosen, is_on_policy=True)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - started) / 3
    print(f"{stats.num_tokens / seconds:.0f} trained tokens/s of a small model in bfloat16")
    assert seconds < 30


def on_two_gpus(world: World) -> dict[str, Outcome]:
    """The scenarios that involve communication, on this rank's GPU."""
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", world.rank)
    return {name: outcome_of(SCENARIOS[name], world, device) for name in ON_TWO}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    found = ranks.run("tests.gpu.test_learner_cuda:on_two_gpus", tmp_path, timeout_s=600)
    for rank in found:
        if not isinstance(rank.outcome, dict):
            pytest.fail(f"{rank.outcome!r}\n{rank.output}")
    for name, outcome in found[0].outcome.items():
        alone = outcome_of(SCENARIOS[name], ONE, CUDA)
        tolerance = 0.05 if name == "bfloat16" else 1e-3
        loss = alone.stats[0].loss_metrics["loss"]
        assert outcome.stats[0].loss_metrics["loss"] == pytest.approx(loss, abs=tolerance), name
        assert outcome.stats[0].grad_norm == pytest.approx(alone.stats[0].grad_norm, rel=tolerance)
        assert direction(outcome.gradients, alone.gradients) > 1 - tolerance, name
