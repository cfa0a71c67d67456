"""The trajectory file format: one JSON object per line, gzipped, with the same bytes for the same trajectories.

A line holds what training and reading need and no times (DESIGN.md section 5). Turns carry the tool calls that the
reply's text holds, parsed; pictures are named by hash, and their PNGs lie in `png/` beside the files.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast

import numpy as np

from polyturn.data.files import atomic_path
from polyturn.types import ImageRecord, Json, Trajectory, Turn

SCHEMA_VERSION = 1

ParseCalls = Callable[[str], Sequence[Json]]  # reply text -> its tool calls as JSON
FinalAnswer = Callable[[str], str | None]  # last reply's text -> the answer that is graded


class ImageEntry(TypedDict):
    """One picture: content hash and size in pixels."""

    sha256: str
    width: int
    height: int


class TurnEntry(TypedDict):
    """One assistant reply and what the environment answered (None: the trajectory ended here)."""

    text: str
    tool_calls: list[Json]
    observation: str | None
    observation_images: list[str]
    info: dict[str, Json]
    num_tokens: int


class TrajectoryEntry(TypedDict):
    """One line of a trajectory file; token_ids, loss_mask and logprobs have the same length."""

    schema_version: Literal[1]
    step: int
    group: int
    sibling: int
    problem_id: str
    problem: str
    answer: str
    policy_version: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    images: list[ImageEntry]
    turns: list[TurnEntry]
    reward: float | None
    reward_terms: dict[str, float]
    advantage: float | None
    status: str
    stop_reason: str
    error: str | None
    final_answer: str | None
    reward_failures: NotRequired[list[str]]
    tokens: NotRequired[dict[str, int]]  # by role, see TokenCounts
    num_rewritten: NotRequired[int | None]
    env_failures: NotRequired[dict[str, int]]  # see EnvFailures


class TrajectoryFileError(ValueError):
    """A trajectory file cannot be read; the message names the file and the line."""


def step_path(directory: Path, step: int) -> Path:
    """The file of one training step."""
    return directory / f"step_{step:06d}.jsonl.gz"


def to_record(
    trajectory: Trajectory,
    *,
    step: int,
    advantage: float | None,
    parse_calls: ParseCalls,
    final_answer: FinalAnswer,
) -> TrajectoryEntry:
    """The JSON form of one trajectory.

    float32 logprobs are written as the shortest decimals that read back to the same float32. `advantage` is None
    where there is none (evaluation, a trajectory without reward).
    """
    last = trajectory.turns[-1].reply_text if trajectory.turns else None
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "group": trajectory.group_index,
        "sibling": trajectory.sibling,
        "problem_id": trajectory.problem.id,
        "problem": "\n".join(m.text for m in trajectory.problem.messages if m.role == "user"),
        "answer": trajectory.problem.answer,
        "policy_version": trajectory.policy_version,
        "token_ids": [int(token) for token in trajectory.token_ids],
        "loss_mask": [int(bit) for bit in trajectory.loss_mask],
        "logprobs": [_shortest(value) for value in trajectory.logprobs],
        "images": [_image_entry(image) for image in trajectory.images],
        "turns": [_turn_entry(turn, parse_calls) for turn in trajectory.turns],
        "reward": trajectory.reward,
        "reward_terms": dict(trajectory.reward_terms),
        "advantage": advantage,
        "status": str(trajectory.status),
        "stop_reason": str(trajectory.stop_reason),
        "error": trajectory.error,
        "final_answer": None if last is None else final_answer(last),
        "reward_failures": list(trajectory.reward_failures),
        "tokens": asdict(trajectory.tokens),
        "num_rewritten": trajectory.num_rewritten,
        "env_failures": asdict(trajectory.env_failures),
    }


def logprob_array(entry: TrajectoryEntry) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The logprobs of a line, bit for bit as they were sampled (float32)."""
    return np.asarray(entry["logprobs"], dtype=np.float32)


def write_records(path: Path, records: Iterable[TrajectoryEntry]) -> Path:
    """Write lines atomically; the bytes depend on the records alone (no time, no file name in the gzip header)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=6) as packed:
        for record in records:
            line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            # Half of a surrogate pair, which an environment may say, has no UTF-8, but an escape in JSON.
            packed.write(line.encode(errors="backslashreplace") + b"\n")
    _write_atomically(path, buffer.getvalue())
    return path


def write_step(directory: Path, step: int, records: Iterable[TrajectoryEntry]) -> Path:
    """Write the file of one training step, in (group, sibling) order."""
    ordered = sorted(records, key=lambda record: (record["group"], record["sibling"]))
    return write_records(step_path(directory, step), ordered)


def read_records(path: Path) -> list[TrajectoryEntry]:
    """All lines of one file.

    Raises:
        TrajectoryFileError: it is missing, damaged or of another schema version.
    """
    records: list[TrajectoryEntry] = []
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                records.append(_checked(json.loads(line)))
    except (OSError, EOFError, ValueError) as error:
        raise TrajectoryFileError(
            f"{path} line {number}: {error}; write it again (dvc repro train)"
        ) from None
    return records


def read_step(directory: Path, step: int) -> list[TrajectoryEntry]:
    """All trajectories of one training step.

    Raises:
        TrajectoryFileError: see `read_records`.
    """
    return read_records(step_path(directory, step))


def list_steps(directory: Path) -> list[int]:
    """The steps that have a file, in order."""
    return sorted(
        int(path.name.removeprefix("step_").removesuffix(".jsonl.gz"))
        for path in directory.glob("step_*.jsonl.gz")
    )


def thin(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps, evenly spaced, with the first and the last.

    >>> thin([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if count >= len(steps):
        return list(steps)
    last = len(steps) - 1
    return [steps[round(index * last / max(1, count - 1))] for index in range(count)]


def save_pictures(directory: Path, images: Iterable[ImageRecord]) -> None:
    """Write each picture's PNG as `directory`/<sha256>.png unless it is there already."""
    for image in images:
        path = directory / f"{image.sha256}.png"
        if not path.exists():
            _write_atomically(path, image.read())


def _turn_entry(turn: Turn, parse_calls: ParseCalls) -> TurnEntry:
    observation = turn.observation
    return {
        "text": turn.reply_text,
        "tool_calls": list(parse_calls(turn.reply_text)),
        "observation": None if observation is None else observation.text,
        "observation_images": [image.sha256 for image in observation.images] if observation else [],
        "info": dict(turn.info),
        "num_tokens": len(turn.reply_ids),
    }


def _image_entry(image: ImageRecord) -> ImageEntry:
    return {"sha256": image.sha256, "width": image.width, "height": image.height}


def _shortest(value: np.float32) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a logprob must be finite, got {value}")
    return float(str(value))


def _checked(record: object) -> TrajectoryEntry:
    if not isinstance(record, dict):
        raise ValueError(f"a line must be an object, got {type(record).__name__}")
    version = cast("dict[str, object]", record).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}, got {version!r}")
    return cast("TrajectoryEntry", record)


def _write_atomically(path: Path, payload: bytes) -> None:
    with atomic_path(path) as partial:
        partial.write_bytes(payload)
