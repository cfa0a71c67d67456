"""Directories that are put in place or removed as a whole: over one with an open file, from another disk, or not at all."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from polyturn import directories


def made(directory: Path, text: str) -> Path:
    """A directory with a file and a link to it in a directory below."""
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "file").write_text(text)
    (directory / "link").symlink_to("sub/file")
    return directory


def text_in(directory: Path) -> str:
    assert (directory / "link").is_symlink()
    return (directory / "link").read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which and to which nothing can be renamed."""
    other = tmp_path / "other_disk"
    other.mkdir()
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.is_relative_to(other) != Path(target).is_relative_to(other):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    return other


def test_a_directory_takes_the_place_of_another_or_of_nothing(tmp_path: Path) -> None:
    out = tmp_path / "artifacts" / "raw"
    for text in ("first", "second"):
        directories.replace(made(tmp_path / "built", text), out)
        assert text_in(out) == text
        assert names(tmp_path) == ["artifacts"]
        assert names(out.parent) == ["raw"], "nothing is left beside it"


@pytest.mark.usefixtures("nfs")
def test_one_with_a_file_that_is_held_open_is_replaced_and_stays_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps the file as .nfs*, and rmtree ends with ENOTEMPTY: no reason to throw away what was made."""
    out = made(tmp_path / "raw", "old")
    (out / "held").touch()
    directories.replace(made(tmp_path / "built", "new"), out)
    assert text_in(out) == "new"
    assert not (out / "held").exists()
    assert "could not be removed: [Errno 39] Directory not empty" in caplog.text
    (aside,) = set(names(tmp_path)) - {"raw"}
    assert aside.startswith(".raw.old.")


@pytest.mark.parametrize("is_there", [True, False])
def test_from_another_disk_it_is_copied(tmp_path: Path, other_disk: Path, is_there: bool) -> None:
    out = tmp_path / "artifacts" / "raw"
    if is_there:
        made(out, "old")
    directories.replace(made(other_disk / "built", "new"), out)
    assert text_in(out) == "new"
    assert names(other_disk) == []
    assert names(out.parent) == ["raw"]


def test_a_disk_that_is_full_during_the_copy_costs_nothing(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    out = made(tmp_path / "artifacts" / "raw", "old")
    built = made(other_disk / "built", "new")
    with pytest.raises(OSError, match="No space left"):
        directories.replace(built, out)
    assert (text_in(out), text_in(built)) == ("old", "new")
    assert names(out.parent) == ["raw"]


def test_what_cannot_be_renamed_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    out = made(tmp_path / "raw", "old")
    with pytest.raises(FileNotFoundError):
        directories.replace(tmp_path / "nothing", out)
    assert text_in(out) == "old"
    assert names(tmp_path) == ["raw"]
