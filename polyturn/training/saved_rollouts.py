"""Groups read back from the trajectory files of an earlier run, to train on them without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from polyturn import trajectories
from polyturn.trajectories import TrajectoryEntry
from polyturn.types import (
    EnvFailures,
    Group,
    ImageRecord,
    Message,
    Problem,
    StopReason,
    TokenCounts,
    Trajectory,
    Turn,
)

_KEY = "train.debug.rollouts"


def check_steps(directory: Path, num_steps: int) -> None:
    """Refuse a directory that lacks the file of one of the first `num_steps` steps.

    Raises:
        ValueError: the message names the first one.
    """
    for step in range(num_steps):
        _existing(directory, step)


def saved_groups(directory: Path, step: int, problems: Sequence[Problem]) -> list[Group]:
    """The groups that an earlier run trained on at `step`: ids, masks, logprobs and rewards bit for bit.

    Pictures of a problem are this run's own; those that an environment made are read from `directory`/png.

    Raises:
        ValueError: the step has no file there, or it is about problems or pictures that are not there.
    """
    path = _existing(directory, step)
    by_id = {problem.id: problem for problem in problems}
    entries = trajectories.read_records(path)
    unknown = sorted({entry["problem_id"] for entry in entries} - set(by_id))
    if unknown:
        raise ValueError(
            f"{_KEY}: {path} is about problems that this run does not train on ({', '.join(unknown[:3])}, "
            f"{len(unknown)} in all); use the data params of the run that wrote it"
        )
    return [
        Group(index, tuple(_trajectory(e, by_id[e["problem_id"]], directory) for e in siblings))
        for index, siblings in groupby(entries, key=lambda entry: entry["group"])
    ]


def _existing(directory: Path, step: int) -> Path:
    path = trajectories.step_path(directory, step)
    if not path.exists():
        steps = trajectories.list_steps(directory)
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ValueError(
            f"{_KEY}: {directory} has no {path.name} (steps there: {known}); lower train.steps or name another "
            "directory"
        )
    return path


def _trajectory(entry: TrajectoryEntry, problem: Problem, directory: Path) -> Trajectory:
    pictures = _pictures(entry, problem, directory)
    return Trajectory(
        problem=problem,
        group_index=entry["group"],
        sibling=entry["sibling"],
        turns=_turns(entry, pictures),
        token_ids=np.asarray(entry["token_ids"], dtype=np.int64),
        loss_mask=np.asarray(entry["loss_mask"], dtype=np.int8),
        logprobs=trajectories.logprob_array(entry),
        images=tuple(pictures[image["sha256"]] for image in entry["images"]),
        stop_reason=StopReason(entry["stop_reason"]),
        policy_version=entry["policy_version"],
        error=entry["error"],
        reward=entry["reward"],
        reward_terms=entry["reward_terms"],
        reward_failures=tuple(entry.get("reward_failures", ())),
        tokens=TokenCounts(**entry.get("tokens", {})),
        num_rewritten=entry.get("num_rewritten"),
        env_failures=EnvFailures(**entry.get("env_failures", {})),
    )


def _pictures(
    entry: TrajectoryEntry, problem: Problem, directory: Path
) -> Mapping[str, ImageRecord]:
    found = {image.sha256: image for image in problem.images}
    for image in entry["images"]:
        path = directory / "png" / f"{image['sha256']}.png"
        if image["sha256"] in found:
            continue
        if not path.exists():
            raise ValueError(
                f"{_KEY}: {path} is missing, a picture that the environment made for problem {problem.id}"
            )
        found[image["sha256"]] = ImageRecord(
            image["sha256"], image["width"], image["height"], path=path
        )
    return found


def _turns(entry: TrajectoryEntry, pictures: Mapping[str, ImageRecord]) -> tuple[Turn, ...]:
    """The turns, each with its part of the sampled tokens."""
    sampled = [i for i, is_sampled in enumerate(entry["loss_mask"]) if is_sampled]
    turns: list[Turn] = []
    for saved in entry["turns"]:
        own, sampled = sampled[: saved["num_tokens"]], sampled[saved["num_tokens"] :]
        shown = [pictures[sha256] for sha256 in saved["observation_images"]]
        text = saved["observation"]
        turns.append(
            Turn(
                reply_ids=tuple(entry["token_ids"][i] for i in own),
                reply_logprobs=tuple(entry["logprobs"][i] for i in own),
                reply_text=saved["text"],
                observation=None if text is None else Message("tool", (*shown, text)),
                info=saved["info"],
            )
        )
    return tuple(turns)
