"""Checkpoints: the marker last, damage passed over, a full disk harmless, two kept; and the state in them."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from polyturn import checkpoint, run_state
from polyturn.model import Policy
from polyturn.render import Renderer
from polyturn.run_state import Best, RunState
from tests.unit import tiny


def write_text(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights").write_text(text)

    return write


def save(directory: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(directory, step, {"step": step}, write_text(f"weights of {step}"))


def newest(directory: Path) -> int | None:
    found = checkpoint.latest(directory)
    return None if found is None else int(str(found[1]["step"]))


def test_newest_complete_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None
    save(tmp_path, 2, 10)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == tmp_path / "step_000010"
    assert found[1] == {"step": 10}
    assert (found[0] / "weights").read_text() == "weights of 10"


def test_the_marker_is_written_last(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        assert not (directory / checkpoint.MARKER).exists()
        assert newest(tmp_path) is None
        (directory / "weights").write_text("w")

    checkpoint.save(tmp_path, 1, {"step": 1}, write)
    assert newest(tmp_path) == 1


@pytest.mark.parametrize("damage", ["half", "changed", "gone", "no marker", "half a marker"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 complete, step 3 cut to half (speculators #739)."""
    save(tmp_path, 2, 3)
    weights = tmp_path / "step_000003" / "weights"
    marker = tmp_path / "step_000003" / checkpoint.MARKER
    text = weights.read_text()
    {
        "half": lambda: weights.write_text(text[: len(text) // 2]),
        "changed": lambda: weights.write_text(text.replace("3", "4")),
        "gone": weights.unlink,
        "no marker": marker.unlink,
        "half a marker": lambda: marker.write_text(marker.read_text()[:20]),
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == 2
    assert "step_000003 is passed over" in caplog.text


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000006", "step_000008"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 2)
    checkpoint.save(tmp_path, 2, {"step": 2}, write_text("again"))
    assert (tmp_path / "step_000002" / "weights").read_text() == "again"
    assert newest(tmp_path) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("write failed"),
        KeyboardInterrupt(),
    ],
)
def test_a_failed_write_keeps_the_earlier_checkpoint_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    """A full disk half-way; torch reports it as a RuntimeError (IQ-TREE #90)."""
    save(tmp_path, 2)

    def write(directory: Path) -> None:
        (directory / "weights").write_text("half of the")
        raise error

    with pytest.raises(type(error)):
        checkpoint.save(tmp_path, 3, {"step": 3}, write)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]
    assert newest(tmp_path) == 2


def test_a_kill_while_writing_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2)
    partial = tmp_path / ".step_000003.partial"
    partial.mkdir()
    (partial / "weights").write_text("half of the")
    assert newest(tmp_path) == 2
    save(tmp_path, 3)
    assert newest(tmp_path) == 3
    assert not partial.exists()


def test_a_learner_that_runs_out_of_disk_raises_what_a_full_disk_raises(
    policy: Policy, tmp_path: Path
) -> None:
    """An OSError, which the stage turns into one line, not torch's own RuntimeError (IQ-TREE #90)."""
    from polyturn.learner.fsdp import FsdpLearner  # noqa: PLC0415

    own = tiny.copy_of(policy)
    params = tiny.params()
    learner = FsdpLearner(own, Renderer(own), params.learner, params.loss, 1.0)
    checkpoint.save(tmp_path, 2, {"step": 2}, learner.save)
    with tiny.full_disk(100_000), pytest.raises(OSError, match="File too large"):
        checkpoint.save(tmp_path, 3, {"step": 3}, learner.save)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]
    assert newest(tmp_path) == 2


def test_run_state_comes_back_as_it_was(tmp_path: Path) -> None:
    history = [{"rollout/raw_reward": 0.1 + 0.2, "train/lr": 3e-4}, {"rollout/raw_reward": 1 / 3}]
    state = RunState(step=2, best=Best(2, 0.5, 0.25), history=history)
    run_state.save(tmp_path, state, write_text("w"))
    loaded: list[Path] = []
    assert run_state.start(tmp_path, loaded.append, num_steps=2, resume=True) == state
    assert loaded == [tmp_path / "step_000002"]


def test_a_run_further_than_its_number_of_steps_is_refused_before_its_weights_are_loaded(
    tmp_path: Path,
) -> None:
    """Checkpoint at step 10, five steps wanted (training-gym #492)."""
    run_state.save(tmp_path, RunState(step=10), write_text("w"))
    loaded: list[Path] = []
    with pytest.raises(checkpoint.CheckpointError, match=r"train.steps is 5, .* is at step 10"):
        run_state.start(tmp_path, loaded.append, num_steps=5, resume=True)
    assert loaded == []


def test_without_a_checkpoint_a_run_starts_at_step_0(tmp_path: Path) -> None:
    loaded: list[Path] = []
    assert run_state.start(tmp_path, loaded.append, num_steps=2, resume=True) == RunState()
    assert loaded == []


def test_checkpoints_hold_digests_of_all_their_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    marker = json.loads((tmp_path / "step_000001" / checkpoint.MARKER).read_text())
    assert list(marker["files"]) == ["weights"]
    assert len(marker["files"]["weights"]) == 64
