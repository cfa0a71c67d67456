"""What a training run shows of its trajectories in MLflow: a few traces per step, some step files as artifacts.

Traces and artifacts are views beside the files, so a store that refuses them costs a warning, not the run.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from polyturn import trajectories
from polyturn.pictures import Pictures
from polyturn.tracking.run import Run
from polyturn.tracking.store import TrackingError
from polyturn.tracking.traces import log_trajectories
from polyturn.trajectories import TrajectoryEntry

logger = logging.getLogger(__name__)

ARTIFACTS = "trajectories"  # folder of the run's artifacts


@dataclass(frozen=True)
class Gallery:
    """Traces of a run: `traces_per_step` trajectories of each step."""

    run: Run
    traces_per_step: int
    pictures: Pictures

    def show(self, entries: Sequence[TrajectoryEntry]) -> None:
        """Log the chosen trajectories of one step."""
        chosen = choose(entries, self.traces_per_step)
        if not chosen:
            return
        labelled = [(entry, f"version {entry['policy_version']}") for entry in chosen]
        try:
            log_trajectories(self.run, labelled, self.pictures.data_uri)
        except TrackingError as error:
            logger.warning("step %d has no traces: %s", entries[0]["step"], error)


def choose(entries: Sequence[TrajectoryEntry], count: int) -> list[TrajectoryEntry]:
    """`count` of a step: best and worst of the group whose rewards differ most, then of the next group, and so on.

    Trajectories without a reward count as worst; ties go to the first.
    """
    ordered = sorted(entries, key=lambda entry: (entry["group"], entry["sibling"]))
    groups = [list(group) for _, group in groupby(ordered, key=lambda entry: entry["group"])]
    groups.sort(key=_spread, reverse=True)
    chosen: list[TrajectoryEntry] = []
    for group in groups:
        best = max(group, key=_reward)
        others = [entry for entry in group if entry is not best]
        chosen += [best, *([min(others, key=_reward)] if others else [])]
    return chosen[:count]


def _reward(entry: TrajectoryEntry) -> float:
    return float("-inf") if entry["reward"] is None else entry["reward"]


def _spread(group: Sequence[TrajectoryEntry]) -> float:
    rewards = [entry["reward"] for entry in group if entry["reward"] is not None]
    return max(rewards) - min(rewards) if rewards else -1.0


def log_step_files(
    run: Run, directory: Path, count: int, *, pictures: Pictures, tokenizer: Path
) -> None:
    """Keep `count` step files, evenly spaced, with their pictures and the tokenizer as artifacts of the run."""
    steps = trajectories.thin(trajectories.list_steps(directory), count) if count else []
    with TemporaryDirectory() as scratch:
        kept = Path(scratch)
        if tokenizer.exists():
            shutil.copyfile(tokenizer, kept / "tokenizer.json")
        for step in steps:
            source = trajectories.step_path(directory, step)
            shutil.copyfile(source, kept / source.name)
            for entry in trajectories.read_records(source):
                for image in entry["images"]:
                    _copy(pictures.find(image["sha256"]), kept / "png")
        try:
            if steps:
                run.log_artifact(kept, ARTIFACTS)
        except TrackingError as error:
            logger.warning("the run keeps no trajectories: %s", error)


def _copy(picture: Path | None, directory: Path) -> None:
    if picture is None or (directory / picture.name).exists():
        return
    directory.mkdir(exist_ok=True)
    shutil.copyfile(picture, directory / picture.name)
