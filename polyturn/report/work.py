"""Where a training run's time went: seconds, tokens, operations and utilisation by phase, from its logged metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from polyturn.params import Params
from polyturn.policy import flops
from polyturn.policy.flops import Work

History = Mapping[str, Mapping[int, float]]  # metric -> step -> value

METRICS = (
    "perf/rollout_time", "perf/train_time", "perf/eval_time", "perf/update_weights_time",
    "perf/offload_time", "perf/onload_time", "rollout/response_len/mean", "rollout/total_len/mean",
    "rollout/tokens/image_pads", "multi_turn/images/mean", "train/num_tokens",
    "train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max",
)  # fmt: skip
_OTHERS = {  # phases without tokens of their own
    "perf/eval_time": "validation",
    "perf/offload_time": "offload",
    "perf/onload_time": "onload",
    "perf/update_weights_time": "weights to the sampler",
}


@dataclass(frozen=True)
class Machine:
    """What a run was trained on; `gpu` is "" on a CPU. `peak_tflops` is that of one GPU, None where it is not known."""

    gpu: str
    num_processes: int
    peak_tflops: float | None


@dataclass(frozen=True)
class Phase:
    """One phase over all steps; None where there is no such number. `tokens` are sampled or trained ones."""

    name: str
    seconds: float
    tokens: float | None = None
    tflop: float | None = None
    utilisation: float | None = None  # of the peak of all GPUs

    @property
    def tokens_per_second(self) -> float | None:
        """None without tokens or time."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def tflops(self) -> float | None:
        """10^12 operations per second; None where they were not counted."""
        return self.tflop / self.seconds if self.tflop and self.seconds else None


def phases(
    history: History, params: Params, config: Mapping[str, object] | None, machine: Machine
) -> list[Phase]:
    """The phases of a run that took time, in order; without the model's config.json operations are not counted.

    Trajectories per step are prompts_per_step x group_size; groups that dynamic sampling drew beyond that are not in.
    A rollout is counted as one forward pass over every token (what a key/value cache leaves to do), an update as the
    passes that it executes over the share of trajectories that it trained on.
    """
    per_step = params.rollout.prompts_per_step * params.rollout.group_size

    def total(name: str) -> float:
        return per_step * sum(history.get(name, {}).values())

    sampled = total("rollout/response_len/mean")
    trained = sum(history.get("train/num_tokens", {}).values())
    rolled, updated = None, None
    if config and sampled:
        passes = flops.count(
            config,
            _work(total, sampled, len(history["rollout/response_len/mean"]) * per_step, config),
        )
        rolled = passes.forward
        learner = params.learner
        updated = (trained / sampled) * passes.update(
            is_vision_frozen=learner.freeze_vision, recomputes=learner.activation_checkpointing
        )
    found = [
        _phase("rollout", "perf/rollout_time", history, Done(sampled, rolled), machine),
        _phase("update", "perf/train_time", history, Done(trained, updated), machine),
        *(_phase(name, key, history, Done(), machine) for key, name in _OTHERS.items()),
    ]
    return [phase for phase in found if phase.seconds > 0]


def _work(
    total: Callable[[str], float],
    sampled: float,
    num_trajectories: int,
    config: Mapping[str, object],
) -> Work:
    merge = cast("Mapping[str, int]", config["vision_config"])["spatial_merge_size"]
    tokens, pictures = total("rollout/total_len/mean"), total("multi_turn/images/mean")
    patches = total("rollout/tokens/image_pads") * merge**2
    return Work(
        tokens=tokens,
        mean_length=tokens / num_trajectories,
        scored=sampled,
        patches=patches,
        patches_per_picture=patches / pictures if pictures else 0.0,
    )


@dataclass(frozen=True)
class Done:
    """Tokens and operations of a phase; None where they are not counted."""

    tokens: float | None = None
    operations: float | None = None


def _phase(name: str, key: str, history: History, done: Done, machine: Machine) -> Phase:
    seconds = sum(history.get(key, {}).values())
    tflop = done.operations / 1e12 if done.operations else None
    utilisation = None
    if tflop and seconds and machine.gpu and machine.peak_tflops:
        utilisation = tflop / seconds / (machine.peak_tflops * machine.num_processes)
    return Phase(name, seconds, done.tokens or None, tflop, utilisation)
