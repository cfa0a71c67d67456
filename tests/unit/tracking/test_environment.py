"""The recorded diff: what git makes of odd files and of its user's settings, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import time
from importlib import metadata
from pathlib import Path

import pytest

from polyturn.params import TrackingParams
from polyturn.pipeline import reproduce
from polyturn.tracking import environment, open_run, recorded

TRACKING = TrackingParams()
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org")


def commit_all(project: Path) -> None:
    (project / ".gitignore").write_text("mlflow.db*\nmlartifacts\n.polyturn\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, *command], cwd=project, check=True)


SETTINGS = (
    "diff.noprefix=true", "diff.mnemonicPrefix=true", "diff.context=0", "diff.external=/bin/false", "color.ui=always",
    "color.diff=always", "core.quotePath=true", "diff.submodule=log",
)  # fmt: skip


def test_the_diff_is_one_that_applies_whatever_git_is_told_to_show_people(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A user's own settings of git (no a/ and b/, colours, difftastic, no context), files that are not UTF-8, and line
    ends of Windows."""
    settings = dict(setting.split("=") for setting in SETTINGS)
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for number, (key, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    files = {
        "latin.py": (b"a = 1  # gr\xfc\xdfe\nb = 1\n", b"a = 1  # gr\xfc\xdfe\nb = 2\n"),
        "windows.py": (b"a = 1\r\nb = 1\r\nc = 1\r\n", b"a = 1\r\nb = 2\r\nc = 1\r\n"),
        "größe.py": (b"a = 1\n", b"a = 2\n"),
    }
    (project / "params.yaml").write_text("seed: 0\n")
    for name, (before, _) in files.items():
        (project / name).write_bytes(before)
    commit_all(project)
    for name, (_, after) in files.items():
        (project / name).write_bytes(after)
    (project / "grün.py").write_text("d = 1\n")
    with open_run(TRACKING, root=project, name="train") as run:
        pass
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(project), str(clone)], check=True)
    record = recorded.read(run.store, run.run_id)
    assert record.untracked == []
    reproduce._apply(record, clone)
    for name, (_, after) in files.items():
        assert (clone / name).read_bytes() == after
    assert (clone / "grün.py").read_text() == "d = 1\n"


def test_a_repository_that_git_refuses_to_read_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Such as one of another user in a container: `detected dubious ownership in repository`."""
    assert environment.capture(project).commit is None
    assert caplog.text == "", "no repository is no fault"
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    assert environment.capture(project).commit is None
    assert caplog.text == "", "nor is one without a commit"
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert environment.capture(project).commit is None
    assert "neither commit nor diff" in caplog.text
    assert "dubious ownership" in caplog.text


def test_line_ends_that_git_refuses_to_add_cost_no_edit(
    project: Path, caplog: pytest.LogCaptureFixture
):
    (project / "code.py").write_text("a = 1\n")
    commit_all(project)
    (project / "code.py").write_text("a = 2\n")
    (project / "mixed.py").write_bytes(b"a = 1\r\nb = 1\n")
    subprocess.run(["git", "config", "core.autocrlf", "input"], cwd=project, check=True)
    subprocess.run(["git", "config", "core.safecrlf", "true"], cwd=project, check=True)
    diff = environment.capture(project).diff
    assert "+a = 2" in diff
    assert "mixed.py" in diff
    assert caplog.text == ""


def test_edits_that_cannot_be_recorded_are_told(project: Path, caplog: pytest.LogCaptureFixture):
    (project / "code.py").write_text("a = 1\n")
    commit_all(project)
    (project / "code.py").write_text("a = 2\n")
    (project / ".git/info/attributes").write_text("*.py filter=gone\n")
    for key, value in (("clean", "false"), ("required", "true")):
        subprocess.run(["git", "config", f"filter.gone.{key}", value], cwd=project, check=True)
    assert environment.capture(project).diff == ""
    assert "the recorded diff" in caplog.text
    assert "is not whole" in caplog.text


def test_an_edit_in_the_second_of_the_commit_is_seen(project: Path):
    """Of the same length, as `git checkout && sed -i s/1/2/` makes it: git then goes by the time of its index."""
    (project / "code.py").write_text("a = 1\n")
    commit_all(project)
    (project / "code.py").write_text("a = 2\n")
    index = project / ".git/index"
    stamp = (project / "code.py").stat()
    os.utime(index, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    time.sleep(1.1)
    assert "+a = 2" in environment.capture(project).diff


def test_versions_of_all_that_is_installed_are_recorded() -> None:
    found = environment.installed_packages()
    assert len(found) > 100
    for name in ("torch", "mlflow", "typing-extensions", "polyturn"):
        assert found[name] == metadata.version(name)
    first: dict[str, str] = {}
    for distribution in metadata.distributions():
        first.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    assert found == dict(sorted(first.items()))
