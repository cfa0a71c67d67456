"""The mirror of checkpoints: what a snapshot holds, when it is made, and what a store that is away or a lost lease does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from polyturn.objects import Objects, UnreachableError
from polyturn.pipeline.lease import LeaseError
from polyturn.pipeline.object_lease import ObjectLease
from polyturn.training import checkpoint
from polyturn.training.run_state import Best, RunState
from polyturn.training.snapshots import Snapshots
from tasks.mirror import Mirror, newest_step
from tests import s3
from tests.toy_project import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server with the bucket `team`."""
    with s3.serving("team") as url:
        yield url


@pytest.fixture
def objects(server: str, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty prefix of the bucket."""
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return Objects(f"s3://team/{uuid4().hex}", endpoint_url=server, attempts=1)


@pytest.fixture
def lease(objects: Objects) -> Iterator[ObjectLease]:
    """Held for the test."""
    held = ObjectLease(objects, "lease.json", seconds=1.0, on_loss=lambda: None)
    held.acquire("run x")
    yield held
    held.release()


def train(work: Path, step: int, *, best: int) -> None:
    """Leave what training leaves after `step` steps, one more step's files included, and a checkpoint."""
    for done in range(step + 1):
        for name in (
            f"trajectories/step_{done:06d}.jsonl.gz",
            f"trajectory_times/step_{done:06d}.jsonl",
        ):
            write(work / name, name)
    write(work / "trajectories/png/a.png", "picture")
    for version in range(step + 1):
        write(work / f"candidates/version_{version:06d}/model.safetensors", f"policy {version}")
    lines = [json.dumps({"step": done}) + "\n" for done in range(step + 1)]
    write(work / "journal.jsonl", "".join(lines) + '{"step": 9')  # cut short by a kill
    partial = checkpoint.begin(work / "checkpoints", step)
    write(partial / "optimizer.pt", f"moments of {step}")
    state = RunState(step=step, best=Best(best, 0.5, 0.4))
    checkpoint.commit(work / "checkpoints", step, state.model_dump(mode="json"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def test_a_snapshot_holds_what_a_run_needs_to_go_on(
    objects: Objects, lease: ObjectLease, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    with Mirror(work, Snapshots(objects, keep=2), lease):
        train(work, 2, best=1)
        wait_until(lambda: Snapshots(objects, keep=2).latest() == 2, seconds=20)
    assert Snapshots(objects, keep=2).pull(tmp_path / "there") == 2
    assert names(tmp_path / "there") == [
        "candidates/version_000001/model.safetensors",
        "checkpoints/step_000002/complete.json",
        "checkpoints/step_000002/optimizer.pt",
        "journal.jsonl",
        "trajectories/png/a.png",
        "trajectories/step_000000.jsonl.gz",
        "trajectories/step_000001.jsonl.gz",
        "trajectory_times/step_000000.jsonl",
        "trajectory_times/step_000001.jsonl",
    ]
    assert (tmp_path / "there/journal.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    found = checkpoint.latest(tmp_path / "there/checkpoints")
    assert found is not None
    assert RunState.model_validate(found[1]).best.version == 1
    assert not (work / ".mirror").exists()


def test_the_newest_checkpoint_is_pushed_when_a_run_ends_by_an_error(
    objects: Objects, lease: ObjectLease, tmp_path: Path
) -> None:
    """So that another worker goes on from there, not from an earlier one."""
    work = tmp_path / "work"

    def run() -> None:
        with Mirror(work, Snapshots(objects, keep=1), lease):
            train(work, 3, best=-1)
            raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        run()
    assert Snapshots(objects, keep=1).latest() == 3


def test_a_store_that_is_away_costs_one_warning_and_nothing_else(
    objects: Objects, lease: ObjectLease, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    work, upload, is_away = tmp_path / "work", objects.upload, True

    def flaky(name: str, path: Path) -> None:
        if is_away:
            raise UnreachableError("no route")
        upload(name, path)

    monkeypatch.setattr(objects, "upload", flaky)
    with Mirror(work, Snapshots(objects, keep=2), lease):
        train(work, 1, best=-1)
        time.sleep(3.5)
        assert caplog.text.count("is not in the store of train.work_uri yet: no route") == 1
        is_away = False
        wait_until(lambda: Snapshots(objects, keep=2).latest() == 1, seconds=20)


def test_a_run_whose_lease_was_taken_publishes_nothing_and_says_who_has_it(
    objects: Objects, lease: ObjectLease, tmp_path: Path
) -> None:
    work = tmp_path / "work"

    def run() -> None:
        with Mirror(work, Snapshots(objects, keep=2), lease):
            objects.delete("lease.json")
            time.sleep(1.0)
            train(work, 1, best=-1)
            time.sleep(2.0)
            raise SystemExit(143)  # what the lease's loss leads to

    with pytest.raises(LeaseError, match="was taken over by nobody: it was removed"):
        run()
    assert Snapshots(objects, keep=2).latest() is None


def test_the_newest_step_is_read_from_complete_checkpoints_alone(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None
    train(tmp_path, 2, best=-1)
    (tmp_path / "checkpoints/step_000009").mkdir()
    (tmp_path / "checkpoints/step_000007.damaged").mkdir()
    write(tmp_path / "checkpoints/step_000007.damaged/complete.json", "{}")
    assert newest_step(tmp_path) == 2
