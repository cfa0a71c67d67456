"""Files that are links, as DVC makes them of outs and datasets with cache.type symlink."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from polyturn.data.files import inside
from polyturn.data.loopback import serve_directory

OBJECT = "files/md5/ab/cdef0123456789abcdef0123456789"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory whose files DVC has moved into its cache, beside a file that is nobody's business."""
    made = tmp_path / "pictures"
    (made / "deep").mkdir(parents=True)
    cached = tmp_path / "cache" / OBJECT
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (made / "deep" / "a.png").symlink_to(cached)
    (made / "link.png").symlink_to(tmp_path / "secret.png")
    (made / "plain.png").write_bytes(b"plain")
    return made


def test_links_into_dvcs_cache_are_files_and_others_lead_out(directory: Path) -> None:
    """treeverse/dvc#5486: a path that is resolved is that of the object in the cache."""
    read = {name: inside(directory, name) for name in ("deep/a.png", "deep/../plain.png")}
    assert [path and path.read_bytes() for path in read.values()] == [b"picture", b"plain"]
    for name in ("link.png", "../secret.png", f"../cache/{OBJECT}", "/etc/hostname"):
        assert inside(directory, name) is None


def test_a_directory_that_is_a_link_itself_is_one(directory: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(directory)
    for name in ("plain.png", str(alias / "plain.png"), str(directory / "plain.png")):
        found = inside(alias, name)
        assert found is not None
        assert found.read_bytes() == b"plain"


def test_pictures_that_are_links_into_dvcs_cache_are_served(directory: Path) -> None:
    async def fetch() -> list[int]:
        async with serve_directory(directory) as (host, port), aiohttp.ClientSession() as session:
            found: list[int] = []
            for name in ("deep/a.png", "plain.png", "link.png", "..%2Fsecret.png"):
                async with session.get(f"http://{host}:{port}/{name}") as answer:
                    found.append(answer.status)
            return found

    assert asyncio.run(fetch()) == [200, 200, 404, 404]
