"""DVC's objects by digest: whole or not in the cache, out of cache or remote without dvc.lock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from polyturn.pipeline.dvc_objects import DvcError, ObjectCache, missing_in_remote, pull

pytestmark = pytest.mark.full  # every dvc command takes a second or more

FILES = {"config.json": "{}", "nested/weights": "w" * 1000}


def dvc(root: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", "-q", *arguments], cwd=root, check=True)


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def added(root: Path, name: str, files: dict[str, str]) -> str:
    """Put a directory into the cache, and forget its .dvc file: its digest is all that is left."""
    write(root / name, files)
    dvc(root, "add", name)
    pointer = root / f"{name}.dvc"
    digest = yaml.safe_load(pointer.read_text())["outs"][0]["md5"]
    pointer.unlink()
    shutil.rmtree(root / name)
    return str(digest)


def contents(directory: Path) -> dict[str, str]:
    files: Sequence[Path] = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_text() for path in files}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    dvc(root, "init", "--no-scm")
    dvc(root, "remote", "add", "-d", "shared", "../remote-of-tests")
    return root


def test_an_object_comes_from_the_cache_and_else_from_the_remote(
    project: Path, tmp_path: Path
) -> None:
    write(project / "policy", FILES)
    dvc(project, "add", "policy")
    dvc(project, "push", "policy.dvc")
    digest = added(project, "policy", FILES)
    cache = ObjectCache.of(project)
    assert cache.missing(digest) == []
    assert {file.name for file in cache.files(digest)} == set(FILES)
    pull(project, digest, tmp_path / "one")
    shutil.rmtree(cache.directory)
    assert cache.missing(digest) == [digest]
    assert missing_in_remote(project, digest) == []
    pull(project, digest, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == FILES
    assert cache.missing(digest) == []
    with pytest.raises(DvcError, match="exists; name another directory"):
        pull(project, digest, tmp_path / "two")


def test_an_object_that_lost_a_file_is_not_whole(project: Path, tmp_path: Path) -> None:
    digest = added(project, "other", {"a": "1", "b": "2"})
    cache = ObjectCache.of(project)
    file = next(file for file in cache.files(digest) if file.name == "b")
    cache.path(file.md5).unlink()
    assert cache.missing(digest) == [file.md5]
    assert missing_in_remote(project, digest) == [digest]
    with pytest.raises(DvcError, match=f"{digest} is neither in the cache"):
        pull(project, digest, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_remote_that_lost_a_file_is_not_trusted_for_its_listing(project: Path) -> None:
    write(project / "third", {"a": "third 1", "b": "third 2"})
    dvc(project, "add", "third")
    dvc(project, "push", "third.dvc")
    digest = yaml.safe_load((project / "third.dvc").read_text())["outs"][0]["md5"]
    lost = ObjectCache.of(project).files(digest)[0].md5
    (project.parent / "remote-of-tests/files/md5" / lost[:2] / lost[2:]).unlink()
    assert missing_in_remote(project, digest) == [lost]


def test_what_is_no_digest_is_no_path(project: Path) -> None:
    with pytest.raises(DvcError, match="is no digest"):
        ObjectCache.of(project).path("../../etc/passwd")
