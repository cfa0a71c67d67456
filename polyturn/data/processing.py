"""Rows -> outcomes: the concurrent part of the images stage, the same in every engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn.data.acquire import Acquirer
from polyturn.data.cache import FetchCache
from polyturn.data.fetching import Fetcher
from polyturn.data.files import read_jsonl
from polyturn.data.loopback import serve_directory
from polyturn.data.outcome import ImageOutcome
from polyturn.data.quarantine import RowError
from polyturn.data.raw import PICTURES
from polyturn.data.store_pool import StorePool
from polyturn.data.storing import Picture
from polyturn.data.urls import public_url
from polyturn.params import ImagesParams

_ROWS_PER_SLOT = 4  # rows read ahead of each request slot
Served = Mapping[str, tuple[str, int]]  # host name -> (address, port) of a loopback server


@dataclass(frozen=True)
class ImageJob:
    """Where the images stage reads and writes; `work` is scratch space of its own."""

    raw: Path  # out of the fetch stage
    out: Path
    work: Path
    cache: Path
    logs: Path
    images: ImagesParams
    dedup_splits: bool

    @property
    def png_dir(self) -> Path:
        """Where PNGs lie until the out is published."""
        return self.work / "out" / "png"


@dataclass(frozen=True)
class RowResult:
    """One row, what became of its images, and what was counted since the last result."""

    ordinal: int
    row: Mapping[str, object]
    outcomes: Sequence[ImageOutcome]
    counts: Mapping[str, int]


Emit = Callable[[RowResult], None]
NumberedRows = Iterable[tuple[int, dict[str, object]]]


def read_rows(job: ImageJob) -> Iterator[tuple[int, dict[str, object]]]:
    """The rows of the fetch stage, numbered in the dataset's order."""
    yield from enumerate(read_jsonl(job.raw / "problems.jsonl"))


@asynccontextmanager
async def serve_pictures(job: ImageJob) -> AsyncIterator[Served]:
    """A loopback server for images.serve_host; nothing if that is null."""
    if job.images.serve_host is None:
        yield {}
        return
    async with serve_directory(job.raw / PICTURES) as address:
        yield {job.images.serve_host: address}


async def process_rows(
    job: ImageJob,
    rows: NumberedRows,
    served: Served,
    *,
    cache: FetchCache,
    emit: Emit,
    log_name: str,
) -> None:
    """Process rows concurrently, with memory bounded by the rows in flight; results come as they are done.

    Raises:
        ExceptionGroup: an error that stops the run, such as S3AccessError.
    """
    limits = job.images
    async with AsyncExitStack() as stack:
        fetcher = await stack.enter_async_context(Fetcher(limits, served))
        log = stack.enter_context((job.logs / log_name).open("a", encoding="utf-8"))
        pool = await stack.enter_async_context(StorePool(limits, job.png_dir))
        acquirer = Acquirer(limits, job.raw / PICTURES, cache, fetcher, log)
        worker = _Worker(acquirer, pool, emit)
        room = asyncio.Semaphore(limits.concurrency * _ROWS_PER_SLOT)
        async with asyncio.TaskGroup() as tasks:
            for ordinal, row in rows:
                await room.acquire()
                task = tasks.create_task(worker.process(ordinal, row))
                task.add_done_callback(lambda _: room.release())


def run_tasks(work: Coroutine[object, object, None]) -> None:
    """Run to the end; the first error of a task is raised as itself, not in a group."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        raise error from None


@dataclass(frozen=True)
class _Worker:
    """What every row needs."""

    acquirer: Acquirer
    pool: StorePool
    emit: Emit

    async def process(self, ordinal: int, row: dict[str, object]) -> None:
        outcomes = [await self._image(source) for source in cast("list[str]", row["images"])]
        counts = Counter(self.acquirer.counts)
        self.acquirer.counts.clear()
        self.emit(RowResult(ordinal, row, outcomes, counts))

    async def _image(self, source: str) -> ImageOutcome:
        shown = public_url(source)
        try:
            body = await self.acquirer.get(source)
        except RowError as error:
            return ImageOutcome(shown, error.reason, error.detail)
        return await self.pool.store(Picture(shown, body.data, body.sha256))
