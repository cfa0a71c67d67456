"""Checkpoints: the marker last, damage passed over, a full disk harmless, two kept; and the state in them."""

from __future__ import annotations

import errno
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.training import checkpoint, run_state
from polyturn.training.candidates import Candidates
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.run_state import Best, RunState
from polyturn.world import RankError, World
from tests.unit import ranks, tiny

NO_POLICY = cast("Policy", None)  # where no policy is published


def write_text(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights").write_text(text)

    return write


def write(directory: Path, step: int, work: Callable[[Path], None], *, keep: int = 2) -> None:
    """Write one checkpoint and wait for it."""
    with CheckpointWriter(directory, keep=keep) as writer:
        writer.submit(step, {"step": step}, work)


def save(directory: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        write(directory, step, write_text(f"weights of {step}"), keep=keep)


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
    def check(directory: Path) -> None:
        assert not (directory / checkpoint.MARKER).exists()
        assert newest(tmp_path) is None
        (directory / "weights").write_text("w")

    write(tmp_path, 1, check)
    assert newest(tmp_path) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "half",
        "changed",
        "gone",
        "no marker",
        "half a marker",
        "[]",
        "3",
        '{"files": []}',
        '{"files": {}}',
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CKPT-17: step 2 complete, step 3 cut to half (speculators #739)."""
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
    }.get(damage, lambda: marker.write_text(damage))()
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == 2
    assert "step_000003 is passed over" in caplog.text
    assert names(tmp_path) == ["step_000002", "step_000003.damaged"]
    caplog.clear()
    assert newest(tmp_path) == 2
    assert caplog.text == ""  # it is marked: not looked at again


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", ["step_9", "step_000009x", "step_best", "000009", "step_000009"])
def test_a_directory_is_no_checkpoint_by_its_name(tmp_path: Path, name: str) -> None:
    """CKPT-17: any directory named by a number was trusted (speculators #739)."""
    save(tmp_path, 2)
    (tmp_path / name).mkdir()
    (tmp_path / name / "weights").write_text("who knows")
    assert newest(tmp_path) == 2


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 2, 4, 6, 8, keep=keep)
    assert names(tmp_path) == [f"step_{step:06d}" for step in (4, 6, 8)[-keep:]]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999, 1_000_000, keep=1)
    assert newest(tmp_path) == 1_000_000


def test_states_are_those_of_readable_markers(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 5, 6, keep=4)
    (tmp_path / "step_000002" / checkpoint.MARKER).unlink()
    (tmp_path / "step_000004" / checkpoint.MARKER).write_text("[]")
    (tmp_path / "step_000005" / checkpoint.MARKER).write_text("{")
    assert checkpoint.states(tmp_path) == [{"step": 6}]


def test_a_damaged_one_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    save(tmp_path, 2, 5, keep=2)
    (tmp_path / "step_000005" / "weights").write_text("changed")
    assert newest(tmp_path) == 2
    save(tmp_path, 3, keep=1)
    assert newest(tmp_path) == 3


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_checkpoints_of_a_run_that_was_given_up_do_not_push_out_the_first_ones_of_another(
    tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers #37260: 500, 600 and 700 lay there, and the new run's 100 was removed as the oldest."""
    save(tmp_path, 500, 600, 700, keep=3)
    save(tmp_path, 100, keep=keep)
    assert newest(tmp_path) == 100
    assert "step_000700 is removed: the run is at step 100 only" in caplog.text
    save(tmp_path, 200, keep=keep)
    assert newest(tmp_path) == 200


@pytest.mark.usefixtures("nfs")
def test_a_directory_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """prime-rl #1763, TRL #2928: another program holds a file open on NFS; old ones stay, and new ones take their place."""
    save(tmp_path, 1, keep=1)
    (tmp_path / "step_000001" / "held").touch()
    save(tmp_path, 2, 3, keep=1)
    assert names(tmp_path) == ["step_000001", "step_000003"]
    assert "step_000001 could not be removed: " in caplog.text
    write(tmp_path, 1, write_text("again"), keep=3)
    assert (tmp_path / "step_000001" / "weights").read_text() == "again"
    assert newest(tmp_path) == 1
    candidates = tmp_path / "candidates"
    for version in (1, 2, 3):
        (candidates / f"version_00000{version}").mkdir(parents=True)
    (candidates / "version_000001" / "held").touch()
    Candidates(NO_POLICY, candidates).prune({3})
    assert names(candidates) == ["version_000001", "version_000003"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 2)
    write(tmp_path, 2, write_text("again"))
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
    """CKPT-20: a full disk half-way; torch reports it as a RuntimeError (IQ-TREE #90)."""
    save(tmp_path, 2)

    def half(directory: Path) -> None:
        (directory / "weights").write_text("half of the")
        raise error

    with pytest.raises(type(error)):
        write(tmp_path, 3, half)
    assert names(tmp_path) == ["step_000002"]
    assert newest(tmp_path) == 2


@dataclass
class SlowWrite:
    """A write that ends when it is told to."""

    started: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __call__(self, directory: Path) -> None:
        (directory / "weights").write_text("w")
        self.started.set()
        assert self.may_end.wait(20)
        if self.error:
            raise self.error


def test_training_goes_on_while_a_checkpoint_is_written_and_the_end_waits(tmp_path: Path) -> None:
    slow = SlowWrite()
    save(tmp_path, 2)
    with CheckpointWriter(tmp_path, keep=2) as writer:
        writer.submit(3, {"step": 3}, slow)
        assert slow.started.wait(20)  # and here training goes on
        assert newest(tmp_path) == 2
        threading.Timer(0.1, slow.may_end.set).start()
    assert newest(tmp_path) == 3


def test_one_is_written_at_a_time(tmp_path: Path) -> None:
    slow = SlowWrite()
    seen: list[int | None] = []
    with CheckpointWriter(tmp_path, keep=2) as writer:
        writer.submit(3, {"step": 3}, slow)
        threading.Timer(0.1, slow.may_end.set).start()
        writer.submit(4, {"step": 4}, lambda _: seen.append(newest(tmp_path)))
    assert seen == [3]


def test_a_failed_write_is_raised_once_by_whoever_waits_next(tmp_path: Path) -> None:
    full = SlowWrite(error=OSError(errno.ENOSPC, "No space left on device"))
    full.may_end.set()
    save(tmp_path, 2)
    with CheckpointWriter(tmp_path, keep=2) as writer:
        writer.submit(3, {"step": 3}, full)
        with pytest.raises(OSError, match="No space left"):
            writer.submit(4, {"step": 4}, write_text("w"))
        assert newest(tmp_path) == 2
    assert names(tmp_path) == ["step_000002"]


def fail_while_writing(directory: Path, write: SlowWrite) -> None:
    with CheckpointWriter(directory, keep=2) as writer:
        writer.submit(3, {"step": 3}, write)
        raise ValueError("the cause")


def test_the_error_that_ends_a_run_is_told_rather_than_that_of_its_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = SlowWrite(error=OSError(errno.ENOSPC, "No space left on device"))
    full.may_end.set()
    with pytest.raises(ValueError, match="the cause"):
        fail_while_writing(tmp_path, full)
    assert "the last checkpoint was not written" in caplog.text


def test_a_run_that_ends_by_an_error_still_has_its_last_checkpoint(tmp_path: Path) -> None:
    slow = SlowWrite()
    threading.Timer(0.1, slow.may_end.set).start()
    with pytest.raises(ValueError, match="the cause"):
        fail_while_writing(tmp_path, slow)
    assert newest(tmp_path) == 3


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
    """CKPT-20: an OSError, which the stage turns into one line, not torch's own RuntimeError (IQ-TREE #90)."""
    from polyturn.learner.fsdp import FsdpLearner  # noqa: PLC0415

    own = tiny.copy_of(policy)
    params = tiny.params()
    learner = FsdpLearner(own, Renderer(own), params.learner, params.loss, 1.0)
    write(tmp_path, 2, learner.snapshot())
    with tiny.full_disk(100_000), pytest.raises(OSError, match="File too large"):
        write(tmp_path, 3, learner.snapshot())
    assert names(tmp_path) == ["step_000002"]
    assert newest(tmp_path) == 2


def keep_state(directory: Path, state: RunState) -> None:
    with CheckpointWriter(directory, keep=2) as writer:
        run_state.save(
            writer, state, lambda: write_text("w"), Candidates(NO_POLICY, directory / "c")
        )


def start(directory: Path, load: Callable[[Path], None], *, num_steps: int) -> RunState:
    writer = CheckpointWriter(directory, keep=2)
    return run_state.start(writer, load, num_steps=num_steps, resume=True)


def test_run_state_comes_back_as_it_was(tmp_path: Path) -> None:
    history = [{"rollout/raw_reward": 0.1 + 0.2, "train/lr": 3e-4}, {"rollout/raw_reward": 1 / 3}]
    state = RunState(step=2, best=Best(2, 0.5, 0.25), history=history, hours=1 / 7)
    keep_state(tmp_path, state)
    loaded: list[Path] = []
    assert start(tmp_path, loaded.append, num_steps=2) == state
    assert loaded == [tmp_path / "step_000002"]


def test_a_run_further_than_its_number_of_steps_is_refused_before_its_weights_are_loaded(
    tmp_path: Path,
) -> None:
    """CKPT-16: checkpoint at step 10, five steps wanted (training-gym #492)."""
    keep_state(tmp_path, RunState(step=10))
    loaded: list[Path] = []
    with pytest.raises(checkpoint.CheckpointError, match=r"train.steps is 5, .* is at step 10"):
        start(tmp_path, loaded.append, num_steps=5)
    assert loaded == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"step": 1, "seen": 3}, "seen: Extra inputs are not permitted"),
        ({"step": "soon"}, "step: Input should be a valid integer"),
        ([], "Input should be a valid dictionary"),
    ],
)
def test_a_state_of_another_version_is_one_line(
    tmp_path: Path, state: dict[str, int], said: str
) -> None:
    checkpoint.begin(tmp_path, 1)
    checkpoint.commit(tmp_path, 1, state)
    with pytest.raises(checkpoint.CheckpointError, match="another version of polyturn") as raised:
        start(tmp_path, lambda path: None, num_steps=2)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_a_checkpoint_a_run_starts_at_step_0(tmp_path: Path) -> None:
    loaded: list[Path] = []
    assert start(tmp_path, loaded.append, num_steps=2) == RunState()
    assert loaded == []


def test_candidates_that_nothing_names_are_removed_but_not_the_one_of_now(tmp_path: Path) -> None:
    """The checkpoint being written may never be complete: what the one before it calls the best stays."""
    candidates = Candidates(NO_POLICY, tmp_path / "c")
    with CheckpointWriter(tmp_path / "k", keep=1) as writer:
        for step, best in ((2, 0), (4, 3), (6, 5)):
            candidates.path(best).mkdir(parents=True)
            state = RunState(step=step, best=Best(best, 0.5, 0.5))
            run_state.save(writer, state, lambda: write_text("w"), candidates)
            if step == 4:
                assert names(tmp_path / "c") == ["version_000000", "version_000003"]
    assert names(tmp_path / "c") == ["version_000003", "version_000005"]


def write_part(world: World, directory: Path) -> list[str]:
    """Each rank writes a file of its own; returns what every rank says of the directory afterwards."""
    with CheckpointWriter(directory, keep=2, world=world) as writer:
        for step in (2, 3):
            writer.submit(step, {"step": step}, write_text_as(world.rank))
    world.barrier()
    return names(directory / "step_000003")


def write_text_as(rank: int) -> Callable[[Path], None]:
    def work(directory: Path) -> None:
        time.sleep(0.2 * rank)  # rank 0 is done first, and waits
        (directory / f"weights_{rank}").write_text(str(rank))

    return work


def fail_part(world: World, directory: Path) -> str:
    """Rank 1 has no space left; what this rank raises."""
    work = write_text_as(0) if world.is_main else SlowWrite(error=OSError(errno.ENOSPC, "full"))
    if isinstance(work, SlowWrite):
        work.may_end.set()
    writer = CheckpointWriter(directory, keep=2, world=world)
    writer.submit(4, {"step": 4}, work)
    try:
        writer.wait()
    except (OSError, RankError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def on_two_ranks(world: World) -> tuple[list[str], str, list[str]]:
    """The parts of this module's test of two ranks."""
    directory = Path(world.broadcast(tempfile.mkdtemp()))
    whole = write_part(world, directory)
    failed = fail_part(world, directory)
    world.barrier()
    return whole, failed, names(directory)


def test_a_checkpoint_of_two_ranks_counts_when_both_have_written_their_part(tmp_path: Path) -> None:
    first, second = (
        r.outcome for r in ranks.run("tests.unit.training.test_checkpoint:on_two_ranks", tmp_path)
    )
    assert isinstance(first, tuple), first
    assert isinstance(second, tuple), second
    assert first[0] == second[0] == [checkpoint.MARKER, "weights_0", "weights_1"]
    assert first[1].startswith("RankError rank 1 could not write its part of ")
    assert first[1].endswith("[Errno 28] full")
    assert second[1] == "OSError [Errno 28] full"
    assert second[2] == ["step_000002", "step_000003"]


def test_checkpoints_hold_digests_of_all_their_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    marker = json.loads((tmp_path / "step_000001" / checkpoint.MARKER).read_text())
    assert list(marker["files"]) == ["weights"]
    assert len(marker["files"]["weights"]) == 64
