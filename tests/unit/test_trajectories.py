"""The trajectory file format: exact numbers, same bytes, clear errors."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyturn import trajectories
from polyturn.trajectories import TrajectoryEntry, TrajectoryFileError
from polyturn.types import ImageRecord, Json, Message, Problem, StopReason, Trajectory, Turn


def make_trajectory(group: int = 0, sibling: int = 0, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    figure = ImageRecord.from_png(b"figure", 256, 256)
    crop = ImageRecord.from_png(b"crop", 128, 128)
    prompt = Message("user", (figure, "Find the side."))
    problem = Problem(f"p{group}", "train", (Message("system", ("Be brief.",)), prompt), "4")
    mask = np.array([0, 0, 1, 1, 0, 0, 1], dtype=np.int8)
    logprobs = np.where(mask == 1, -rng.random(7) * 3, 0).astype(np.float32)
    turns = (
        Turn(
            (7, 8), (-1.0, -0.5), "<zoom>", Message("tool", (crop, "seen")), {"tool_called": True}
        ),
        Turn((9,), (-0.1,), r"Answer: \boxed{4}", None),
    )
    return Trajectory(
        problem, group, sibling, turns, np.arange(7), mask, logprobs, (figure, crop),
        StopReason.ENV_DONE, policy_version=3, reward=1.0, reward_terms={"correctness": 1.0},
    )  # fmt: skip


def calls_of(text: str) -> Sequence[Json]:
    return [{"name": "zoom"}] if "<zoom>" in text else []


def record_of(trajectory: Trajectory) -> TrajectoryEntry:
    return trajectories.to_record(
        trajectory, step=2, advantage=0.5, parse_calls=calls_of, final_answer=lambda text: text[-2]
    )


def test_record_names_what_was_said_called_and_shown():
    record = record_of(make_trajectory())
    assert record["problem"] == "Find the side."
    assert record["final_answer"] == "4"
    assert record["status"] == "completed"
    assert record["stop_reason"] == "env_done"
    first, last = record["turns"]
    assert first["tool_calls"] == [{"name": "zoom"}]
    assert first["observation"] == "seen"
    assert first["observation_images"] == [record["images"][1]["sha256"]]
    assert first["num_tokens"] == 2
    assert last["observation"] is None


def test_logprobs_read_back_bit_for_bit(tmp_path: Path):
    originals = [make_trajectory(sibling=i, seed=i) for i in range(50)]
    trajectories.write_step(tmp_path, 2, [record_of(t) for t in originals])
    for original, record in zip(originals, trajectories.read_step(tmp_path, 2), strict=True):
        read = trajectories.logprob_array(record)
        assert read.tobytes() == original.logprobs.tobytes()
        assert record["token_ids"] == original.token_ids.tolist()
        assert record["loss_mask"] == original.loss_mask.tolist()


def test_bytes_do_not_depend_on_time_name_or_arrival_order(tmp_path: Path):
    records = [record_of(make_trajectory(group=g, sibling=s)) for g in range(2) for s in range(2)]
    first = trajectories.write_step(tmp_path / "a", 2, records)
    second = trajectories.write_step(tmp_path / "b", 2, reversed(records))
    renamed = trajectories.write_records(tmp_path / "other.jsonl.gz", records)
    assert first.read_bytes() == second.read_bytes() == renamed.read_bytes()
    assert list(tmp_path.rglob(".*")) == []


def test_steps_are_listed_in_order(tmp_path: Path):
    for step in (10, 2):
        trajectories.write_step(tmp_path, step, [])
    assert trajectories.list_steps(tmp_path) == [2, 10]
    assert trajectories.read_step(tmp_path, 10) == []


def test_halves_of_surrogate_pairs_are_written_and_read_back(tmp_path: Path):
    record = record_of(make_trajectory())
    record["error"] = "ValueError: \ud83d"
    record["turns"][0]["info"] = {"\udc00": ["é", "\ud83d", "\\ud83d"]}
    path = trajectories.write_records(tmp_path / "one.jsonl.gz", [record])
    assert trajectories.read_records(path) == [record]


def test_a_non_finite_logprob_is_refused():
    trajectory = make_trajectory()
    trajectory.logprobs[2] = np.nan
    with pytest.raises(ValueError, match="logprob must be finite"):
        record_of(trajectory)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"schema_version":1}\n{"schema_version":2}\n',
            "line 2: schema_version must be 1, got 2",
        ),
        (b'{"schema_version":1}\nnot json\n', "line 2"),
        (b"[]\n", "line 1: a line must be an object, got list"),
    ],
)
def test_an_unreadable_line_is_named(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "step_000001.jsonl.gz"
    path.write_bytes(gzip.compress(line))
    with pytest.raises(TrajectoryFileError, match=message):
        trajectories.read_records(path)


def test_a_cut_file_and_a_missing_one_are_named(tmp_path: Path):
    path = trajectories.write_step(tmp_path, 1, [record_of(make_trajectory())])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrajectoryFileError, match=r"step_000001\.jsonl\.gz"):
        trajectories.read_step(tmp_path, 1)
    with pytest.raises(TrajectoryFileError, match=r"step_000009\.jsonl\.gz"):
        trajectories.read_step(tmp_path, 9)


def test_lines_hold_no_times(tmp_path: Path):
    path = trajectories.write_step(tmp_path, 1, [record_of(make_trajectory())])
    keys = json.loads(gzip.decompress(path.read_bytes())).keys()
    assert set(keys) == TrajectoryEntry.__required_keys__
    assert not any("time" in key or key.endswith("_s") for key in keys)


def test_pictures_are_saved_once_by_hash(tmp_path: Path):
    images = make_trajectory().images
    trajectories.save_pictures(tmp_path, [*images, *images])
    assert {p.stem for p in tmp_path.iterdir()} == {image.sha256 for image in images}
