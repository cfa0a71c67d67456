"""What a training run writes while it runs: history, trajectories, metrics; all of it resumable."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from polyturn import trajectories, trajectory_times
from polyturn.envs.tools import ToolCall, parse_tool_calls
from polyturn.progress import Progress
from polyturn.reward import extract_answer
from polyturn.training.debug import sample_entry
from polyturn.training.journal import Entry, Journal
from polyturn.training.metrics import Metrics, trajectories_of
from polyturn.types import Group, Json, TrainingSample

logger = logging.getLogger(__name__)

PICTURES = "png"
TRAJECTORIES = "trajectories"
_SHOWN = {  # beside the progress bar; a debug mode lacks some
    "reward": "rollout/raw_reward",
    "turns": "multi_turn/turns/mean",
    "gap": "train/train_rollout_logprob_abs_diff",
    "rollout_s": "perf/rollout_time",
    "train_s": "perf/train_time",
    "eval": "eval/accuracy",
}


class MetricsSink(Protocol):
    """Where metrics of a step go besides the files (an MLflow run)."""

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> None:
        """Take the metrics of one step, which was finished at `at_ms` (Unix time; None: now)."""
        ...


def tool_calls(text: str) -> list[Json]:
    """A reply's tool calls as JSON, errors with their reason."""
    return [
        {"name": call.name, "arguments": dict(call.arguments)}
        if isinstance(call, ToolCall)
        else {"error": call.reason}
        for call in parse_tool_calls(text)
    ]


def records(
    groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], step: int
) -> list[trajectories.TrajectoryEntry]:
    """The file form of a step's trajectories."""
    return [
        trajectories.to_record(
            trajectory,
            step=step,
            advantage=advantage,
            parse_calls=tool_calls,
            final_answer=extract_answer,
        )
        for group, row in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, row, strict=True)
    ]


@dataclass
class Recorder:
    """Keeps a run's history (metrics without times, one mapping per step) and writes its trajectories.

    On resume `begin` brings both back to the checkpoint's step and sends the history to the new sink, so that
    every step enters it once, with the time and the durations that the journal has of it. `is_main` False (the other
    ranks of a run): the history is kept, and nothing is written. `on_rollout` sees each step's trajectories once
    their files are written.
    """

    directory: Path
    sink: MetricsSink
    progress: Progress
    history: list[Metrics] = field(default_factory=list)
    journal: Journal = field(default_factory=partial(Journal, None))
    is_main: bool = True
    on_rollout: Callable[[Sequence[trajectories.TrajectoryEntry]], None] = lambda _: None

    @property
    def trajectory_dir(self) -> Path:
        """Where step files and their pictures lie."""
        return self.directory / TRAJECTORIES

    def begin(self, history: Sequence[Metrics]) -> None:
        """Start with the history of a checkpoint (empty: from scratch); later trajectory files are removed."""
        self.history = list(history)
        if not self.is_main:
            return
        self.trajectory_dir.mkdir(parents=True, exist_ok=True)
        for step in trajectories.list_steps(self.trajectory_dir):
            if step >= len(self.history):
                trajectories.step_path(self.trajectory_dir, step).unlink()
                trajectory_times.times_path(self.trajectory_dir, step).unlink(missing_ok=True)
        if not self.history:
            shutil.rmtree(self.trajectory_dir / PICTURES, ignore_errors=True)
        for step, metrics in enumerate(self.history):
            self._send(self.journal.enter(step, metrics, {}))
        self.progress.update(len(self.history))

    def rollout(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
    ) -> None:
        """Write a step's trajectories and the pictures that its environments made."""
        if not self.is_main:
            return
        entries = records(groups, advantages, step)
        trajectories.write_step(self.trajectory_dir, step, entries)
        trajectory_times.write_times(self.trajectory_dir, step, groups)
        for trajectory in trajectories_of(groups):
            made = trajectory.images[len(trajectory.problem.images) :]
            trajectories.save_pictures(self.trajectory_dir / PICTURES, made)
        self.on_rollout(entries)

    def step(self, step: int, metrics: Metrics, times: Mapping[str, float]) -> None:
        """Take a step's metrics; `times` (perf/...) go to the sink but not into the history."""
        self.history.append(metrics)
        if not self.is_main:
            return
        self._send(self.journal.enter(step, metrics, times))
        known = {**metrics, **times}
        shown = {label: known[name] for label, name in _SHOWN.items() if name in known}
        self.progress.update(1, **shown)
        logger.debug(
            "step %d %s", step, " ".join(f"{key}={value:.4g}" for key, value in shown.items())
        )

    def end(self, step: int, metrics: Metrics) -> None:
        """Take the score of the last policy, which no rollout followed."""
        self.history.append(metrics)
        if self.is_main:
            self._send(self.journal.enter(step, metrics, {}, is_end=True))

    def enters(self, phase: str, step: int) -> None:
        """Say in the log what begins now, so that a run that was killed tells where it was."""
        logger.debug("step %d: %s begins", step, phase)

    def _send(self, entry: Entry) -> None:
        self.sink.log_metrics({**entry.metrics, **entry.times}, step=entry.step, at_ms=entry.at_ms)

    def dump(self, step: int, samples: Sequence[TrainingSample], reason: str) -> Path:
        """Write the samples of a step that went wrong, for a look at them."""
        path = self.directory / f"nonfinite_step_{step:06d}.jsonl"
        if not self.is_main:
            return path
        lines = [json.dumps({"reason": reason, **sample_entry(sample)}) for sample in samples]
        path.write_text("\n".join(lines) + "\n")
        return path
