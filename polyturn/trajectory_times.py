"""Times of trajectories, in files beside those of the trajectories themselves, which hold no times.

`trajectory_times/step_%06d.jsonl` has one line per trajectory of that step: group, sibling and the seconds that its
environment's methods took. Sampling is done for all live trajectories at once; its time is that of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from polyturn.data.files import read_jsonl, write_jsonl
from polyturn.types import Group

Times = Mapping[tuple[int, int], float]  # (group, sibling) -> seconds


def times_directory(trajectories: Path) -> Path:
    """The directory beside that of the trajectories."""
    return trajectories.with_name("trajectory_times")


def times_path(trajectories: Path, step: int) -> Path:
    """The file that belongs to `trajectories`/step_%06d.jsonl.gz."""
    return times_directory(trajectories) / f"step_{step:06d}.jsonl"


def write_times(trajectories: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write the times of one step."""
    path = times_path(trajectories, step)
    rows = (
        {"group": t.group_index, "sibling": t.sibling, "env_time_s": round(t.env_time_s, 6)}
        for group in groups
        for t in group.trajectories
    )
    write_jsonl(path, rows)
    return path


def read_times(trajectories: Path, step: int) -> Times:
    """The times of one step; empty where there are none.

    Raises:
        ValueError: a line is damaged.
    """
    path = times_path(trajectories, step)
    if not path.exists():
        return {}
    return {
        (cast("int", row["group"]), cast("int", row["sibling"])): cast("float", row["env_time_s"])
        for row in read_jsonl(path)
    }
