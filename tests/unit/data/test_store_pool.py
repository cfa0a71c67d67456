"""Pictures are stored alike in a thread and in processes, and a decoder that dies costs one row."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path

import pytest

from polyturn.data import store_pool
from polyturn.data.outcome import ImageOutcome
from polyturn.data.store_pool import StorePool
from polyturn.data.storing import Picture
from polyturn.params import ImagesParams
from tests.unit.data.web import png


def picture(data: bytes, name: str = "p") -> Picture:
    return Picture(name, data, hashlib.sha256(data).hexdigest())


def store_all(
    pictures: list[Picture], directory: Path, num_processes: int
) -> tuple[list[ImageOutcome], dict[str, bytes]]:
    """Outcomes in order, and the files."""
    directory.mkdir()

    async def run() -> list[ImageOutcome]:
        limits = ImagesParams(num_processes=num_processes)
        async with StorePool(limits, directory) as pool:
            return await asyncio.gather(*(pool.store(p) for p in pictures))

    outcomes = asyncio.run(run())
    return outcomes, {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_thread_and_processes_store_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_pool, "_IN_THREAD", 3)
    bodies = [png((20 + i, 40), (i, 0, 0)) for i in range(40)]
    bodies += [png()[:-20], b"plain words", bodies[0], png((2000, 10))]
    pictures = [picture(body, str(i)) for i, body in enumerate(bodies)]
    expected = store_all(pictures, tmp_path / "thread", 0)
    assert store_all(pictures, tmp_path / "processes", 2) == expected
    assert [outcome.url for outcome in expected[0]] == [str(i) for i in range(len(bodies))]
    assert [o.reason for o in expected[0][40:]] == ["truncated", "not_an_image", "", "aspect_ratio"]
    assert len(expected[1]) == 40


def test_a_picture_that_ends_its_decoder_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame of the picture "deadly" ends the child that unpickles it, as a crash inside a codec would."""
    monkeypatch.setattr(store_pool, "_IN_THREAD", 0)

    class Deadly(str):
        __slots__ = ()

        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return os.kill, (_Pid(), signal.SIGKILL)

    pictures = [picture(png(color=(i, 0, 0)), str(i)) for i in range(10)]
    pictures[4] = Picture(Deadly("deadly"), pictures[4].data, pictures[4].sha256)
    outcomes, files = store_all(pictures, tmp_path / "out", 1)
    assert [outcome.reason for outcome in outcomes] == [
        "corrupt" if i == 4 else "" for i in range(10)
    ]
    assert outcomes[4].detail == "decoding it ends the decoder's process"
    assert len(files) == 9


class _Pid:
    """Unpickled, the number of the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.getpid, ()


def test_a_process_that_cannot_start_is_an_error_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_pool, "_IN_THREAD", 0)
    monkeypatch.setattr(store_pool.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        store_all([picture(png())], tmp_path / "out", 1)
