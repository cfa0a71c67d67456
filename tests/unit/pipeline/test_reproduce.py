"""Parts of `polyturn reproduce` on small repositories: the diff, the data, the stages that must run, what is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polyturn.pipeline import reproduce, reproduce_text
from polyturn.pipeline.reproduce import ReproduceError, Reproduction, StageRun
from polyturn.pipeline.reproduction import FirstDifference, Row
from polyturn.tracking.recorded import Recorded

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit with two files."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / "code.py").write_text("x = 1\n")
    (root / "picture.bin").write_bytes(bytes(range(256)))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return root


def record(diff: str = "", *, is_redacted: bool = False, **changes: object) -> Recorded:
    known: dict[str, object] = {
        "run_id": "a" * 32, "name": "train", "commit": "c" * 40, "diff": diff, "is_redacted": is_redacted,
        "params": "seed: 0\n", "lock": "", "outs": {}, "environment": {}, "metrics": {}, "stages": {}, "tags": {},
    }  # fmt: skip
    return Recorded(**{**known, **changes})  # type: ignore[arg-type]


def test_an_uncommitted_diff_is_applied_with_new_and_binary_files(repository: Path):
    (repository / "code.py").write_text("x = 2\n")
    (repository / "new.py").write_text("y = 1\n")
    (repository / "picture.bin").write_bytes(bytes(reversed(range(256))))
    git(repository, "add", "-A")
    diff = git(repository, "diff", "--cached", "--binary", "HEAD")
    git(repository, "reset", "-q", "--hard")
    reproduce._apply(record(diff), repository)
    assert (repository / "code.py").read_text() == "x = 2\n"
    assert (repository / "new.py").read_text() == "y = 1\n"
    assert (repository / "picture.bin").read_bytes() == bytes(reversed(range(256)))


@pytest.mark.parametrize("is_redacted", [False, True])
def test_a_diff_that_does_not_apply_is_named_with_the_reason(repository: Path, is_redacted: bool):
    diff = "diff --git a/code.py b/code.py\n--- a/code.py\n+++ b/code.py\n@@ -1 +1 @@\n-z\n+w\n"
    with pytest.raises(ReproduceError, match="does not apply to its commit") as caught:
        reproduce._apply(record(diff, is_redacted=is_redacted), repository)
    assert ("secrets were taken out" in str(caught.value)) == is_redacted


def test_files_that_git_did_not_know_are_told_unless_the_diff_holds_them():
    found = record(
        "diff --git a/new.py b/new.py\n", environment={"untracked": ["new.py", "notes.bin"]}
    )
    assert found.untracked == ["notes.bin"]


@pytest.mark.parametrize(
    ("data", "is_gone"),
    [
        ({"source": "synthetic"}, False),
        ({"path": "/nowhere/at/all"}, True),
        ({"path": "./absent"}, True),
        ({"path": "owner/dataset"}, False),
        ({"path": "s3://bucket/geo3k"}, False),
        ({"path": "rows.jsonl"}, False),
    ],
)
def test_data_that_is_not_here_any_more_is_noticed(
    repository: Path, data: dict[str, str], is_gone: bool
):
    (repository / "rows.jsonl").write_text("")
    (repository / "params.yaml").write_text(yaml.safe_dump({"data": data}))
    assert reproduce._is_source_gone(repository) == is_gone


def test_data_without_a_digest_cannot_be_restored(repository: Path):
    with pytest.raises(ReproduceError, match="names no digest of artifacts/raw"):
        reproduce._restore_raw(record(), repository)


@pytest.fixture
def pipeline(repository: Path) -> Path:
    """A DVC repository with a stage that works and one that does not."""
    stages = {
        "good": {"cmd": "echo $POLYTURN_TRACKING_URI $POLYTURN_PARENT_RUN_ID > good.txt", "outs": ["good.txt"]},
        "bad": {"cmd": "echo 'error: stage bad: no such key'; exit 2", "deps": ["good.txt"]},
    }  # fmt: skip
    (repository / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=repository, check=True)
    return repository


def test_a_stage_runs_though_it_is_up_to_date_and_logs_to_the_worktrees_own_store(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POLYTURN_TRACKING_URI", "http://the-teams")
    monkeypatch.setenv("POLYTURN_PARENT_RUN_ID", "somebody's")
    log = tmp_path / "log.txt"
    log.write_text("")
    for _ in range(2):
        reproduce._run_stage("good", pipeline, log)
    assert log.read_text().count("Running stage 'good'") == 2
    assert (pipeline / "good.txt").read_text().strip() == f"sqlite:///{pipeline}/mlflow.db"
    with pytest.raises(ReproduceError, match=r"stage bad failed.*error: stage bad: no such key"):
        reproduce._run_stage("bad", pipeline, log)
    assert os.environ["POLYTURN_TRACKING_URI"] == "http://the-teams"


def found(*, is_same: bool) -> Reproduction:
    rows = [
        Row("train", "artifacts/policy", "a" * 32 + ".dir", ("a" if is_same else "b") * 32 + ".dir")
    ]
    numbers = [
        Row("evaluate", "test.policy.sampled.accuracy", "0.5", "0.5"),
        Row("evaluate", "test.n", "2", "2"),
    ]
    curve = None if is_same else FirstDifference(3, "train/loss", 0.5, 0.25)
    stages = [StageRun("fetch", 1.0, is_restored=True), StageRun("train", 2.0)]
    return Reproduction(record(), stages, rows, numbers, curve, 7, [], None)


def test_what_is_said_of_a_reproduction():
    same = reproduce_text.markdown(found(is_same=True))
    assert (
        "Reproduced: all 1 digests, all 2 numbers of metrics.json and every step of 7 curves"
        in same
    )
    assert "| fetch | restored by digest | 1.0 |" in same
    assert "| train | artifacts/policy | aaaaaaaaaaaa.dir | aaaaaaaaaaaa.dir | same |" in same
    assert "test.n" not in same
    other = reproduce_text.markdown(found(is_same=False))
    assert (
        "Not reproduced: 0 of 1 digests and 2 of 2 numbers are the same; the curves part at step 3"
        in other
    )
    assert "(train/loss: 0.5 -> 0.25)" in other
    assert "| bbbbbbbbbbbb.dir | DIFFERS |" in other
    assert found(is_same=True).is_same
    assert not found(is_same=False).is_same
