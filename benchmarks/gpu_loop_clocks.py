"""Clocks of benchmarks/gpu_loop.py: on the learner's passes, the recorder and the GPU, and the logprob gap by turn."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch

from polyturn.learner.base import Logprobs, UpdateStats
from polyturn.learner.fsdp import FsdpLearner
from polyturn.learner.shares import is_scored
from polyturn.training.candidates import Candidates
from polyturn.training.recorder import Recorder
from polyturn.types import TrainingSample

_SAMPLE_S = 0.05  # between two looks at the GPU


@dataclass
class Gap:
    """Sampler against learner on the first trajectory of each group: logprob differences by turn."""

    by_turn: dict[int, list[float]] = field(default_factory=dict)
    by_sample: list[float] = field(
        default_factory=list
    )  # means; one far above the others saw another picture

    def add(self, sample: TrainingSample, own: np.ndarray) -> None:
        """Take a sample and the learner's logprobs of it."""
        scored = is_scored(sample)
        if scored.any():
            self.by_sample.append(float(np.abs(own - sample.logprobs)[scored].mean()))
        turn = np.cumsum(np.diff(scored.astype(int), prepend=0) == 1)
        for number in range(1, int(turn.max(initial=0)) + 1):
            chosen = scored & (turn == number)
            self.by_turn.setdefault(number, []).extend((own - sample.logprobs)[chosen].tolist())

    def table(self) -> dict[str, object]:
        """Mean, 99th percentile, share above ln 2, and k3 (mean of r - 1 - ln r) of learner against sampler."""
        rows = {f"turn_{turn}": np.array(found) for turn, found in sorted(self.by_turn.items())}
        if not rows:
            return {}
        rows["all"] = np.concatenate(list(rows.values()))
        of_samples = [float(value) for value in np.quantile(self.by_sample, (0, 0.5, 1))]
        return {"trajectories_min_median_max": of_samples} | {
            name: {
                "tokens": len(found),
                "mean": float(np.abs(found).mean()),
                "p99": float(np.quantile(np.abs(found), 0.99)),
                "share_above_ln2": float((np.abs(found) > math.log(2)).mean()),
                "k3": float((np.exp(found) - 1 - found).mean()),
            }
            for name, found in rows.items()
        }


@dataclass
class TimedLearner(FsdpLearner):
    """The learner with a clock on its passes."""

    logprobs_s: float = 0.0
    train_s: float = 0.0
    gap: Gap | None = None
    again: dict[str, Callable[[], object]] = field(default_factory=dict)  # the latest passes

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """As the learner does, with every difference kept; the loop asks before each update."""
        self.again["logprobs"] = lambda: FsdpLearner.logprobs(self, samples)
        with self._clock() as took:
            found = super().logprobs(samples)
        self.logprobs_s = took()
        gap = self.gap or Gap()
        for sample, own in zip(samples, found, strict=True):
            gap.add(sample, own)
        return found

    def update(self, samples: Sequence[TrainingSample], **options: object) -> UpdateStats:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As the learner does."""
        self.again["train"] = lambda: FsdpLearner.update(self, samples, **options)  # pyright: ignore[reportArgumentType]
        with self._clock() as took:
            stats = super().update(samples, **options)  # pyright: ignore[reportArgumentType]
        self.train_s += took()
        return stats

    @contextmanager
    def _clock(self) -> Iterator[Callable[[], float]]:
        wait(self._device)
        started = time.monotonic()
        ended: list[float] = []
        yield lambda: ended[0] - started
        wait(self._device)
        ended.append(time.monotonic())


class TimedRecorder(Recorder):
    """The recorder with a clock on its trajectory files."""

    record_s: float = 0.0

    def rollout(self, *given: object) -> None:
        """As the recorder does."""
        started = time.monotonic()
        super().rollout(*given)  # pyright: ignore[reportArgumentType]
        self.record_s = time.monotonic() - started


class Unpublished(Candidates):
    """No policy is written: the loop is measured, not the disk."""

    def publish(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take nothing."""


def wait(device: torch.device) -> None:
    """Let the GPU end what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class GpuWatch:
    """Looks at utilisation and used memory of the visible GPUs in a thread; without NVML it has seen nothing."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, float, float]]] = []  # by GPU: at, busy share, used GiB
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> GpuWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # no NVML here: nothing is told
            import pynvml  # noqa: PLC0415  (GPU hosts only)

            pynvml.nvmlInit()
            # NVML counts all GPUs of the host, CUDA those of CUDA_VISIBLE_DEVICES.
            names = [
                f"GPU-{torch.cuda.get_device_properties(index).uuid}"
                for index in range(torch.cuda.device_count())
            ]
            gpus = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
            self.seen = [[] for _ in gpus]
            while not self._stop.wait(_SAMPLE_S):
                for gpu, seen in zip(gpus, self.seen, strict=True):
                    busy = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) / 100
                    used = float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) / 2**30
                    seen.append((time.monotonic(), busy, used))

    def idle(self, start: float, stop: float) -> list[float]:
        """Of each GPU the share of the time without a kernel, between two monotonic times."""
        busy = [[share for at, share, _ in seen if start <= at <= stop] for seen in self.seen]
        return [1 - sum(shares) / len(shares) for shares in busy if shares]

    @property
    def peak_gib(self) -> list[float]:
        """Of each GPU the most memory that all processes together had."""
        return [max(used for *_, used in seen) for seen in self.seen if seen]
