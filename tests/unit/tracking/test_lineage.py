"""dvc.lock as a file, and digests of files and directories."""

from pathlib import Path

import pytest

from polyturn.tracking.lineage import directory_digest, lock_digests

LOCK = """
schema: '2.0'
stages:
  images:
    cmd: python -m tasks.images
    deps:
    - {path: artifacts/raw, hash: md5, md5: 11111111111111111111111111111111.dir, size: 1, nfiles: 1}
    outs:
    - {path: artifacts/images, hash: md5, md5: 22222222222222222222222222222222.dir, size: 1, nfiles: 1}
  model:
    cmd: python -m tasks.model
    deps:
    - {path: artifacts/images, hash: md5, md5: 33333333333333333333333333333333.dir, size: 1, nfiles: 1}
"""


def test_digests_are_those_of_the_outs_where_a_path_is_both(tmp_path: Path):
    (tmp_path / "dvc.lock").write_text(LOCK)
    assert lock_digests(tmp_path / "dvc.lock") == {
        "artifacts/raw": "1" * 32 + ".dir",
        "artifacts/images": "2" * 32 + ".dir",
    }


def test_no_lock_means_no_digests(tmp_path: Path):
    assert lock_digests(tmp_path / "dvc.lock") == {}
    (tmp_path / "dvc.lock").write_text("")
    assert lock_digests(tmp_path / "dvc.lock") == {}


@pytest.mark.parametrize(
    "text", ["stages: [1, 2]", "stages: {a: {outs: [{md5: x}]}}", "a: [", "[1]"]
)
def test_a_damaged_lock_is_named(tmp_path: Path, text: str):
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(ValueError, match=r"dvc\.lock is no dvc\.lock"):
        lock_digests(tmp_path / "dvc.lock")


def test_a_directory_digest_depends_on_names_and_contents_only(tmp_path: Path):
    for name, files in {
        "a": {"x": "1", "d/y": "2"},
        "b": {"d/y": "2", "x": "1"},
        "renamed": {"z": "1", "d/y": "2"},
        "edited": {"x": "1", "d/y": "3"},
    }.items():
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert directory_digest(tmp_path / "a") == directory_digest(tmp_path / "b")
    assert len({directory_digest(tmp_path / n) for n in ("a", "renamed", "edited")}) == 3
