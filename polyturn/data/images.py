"""The images stage: every image of every row becomes a checked, hashed PNG, or its row is set aside."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn.data.acquire import Acquirer
from polyturn.data.cache import FetchCache
from polyturn.data.fetching import Fetcher
from polyturn.data.files import publish, read_jsonl, write_jsonl
from polyturn.data.ledger import ImageOutcome, Ledger
from polyturn.data.loopback import serve_directory
from polyturn.data.normalise import normalise
from polyturn.data.quarantine import (
    RowError,
    SetAside,
    read_quarantine,
    reason_table,
    write_quarantine,
)
from polyturn.data.raw import PICTURES
from polyturn.data.urls import public_url
from polyturn.params import ImagesParams

_ROWS_PER_SLOT = 4  # rows read ahead of each request slot


class TooManyBadRowsError(ValueError):
    """More rows than images.max_bad_fraction were set aside; the message holds the table of reasons."""


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


@dataclass(frozen=True)
class ImageReport:
    """Counts of a finished images stage; `reasons` covers the fetch stage's rows too."""

    num_rows: int
    num_kept: int
    num_shared: int
    reasons: Mapping[str, int]
    num_fetched: int
    num_cache_hits: int
    num_bytes: int
    num_images: int

    def table(self) -> str:
        """Kept rows and reasons, for a person."""
        counts = {"kept": self.num_kept, **self.reasons}
        return reason_table(counts, self.num_rows)


def build_image_store(
    job: ImageJob, on_row: Callable[[Mapping[str, int]], None] = lambda _: None
) -> ImageReport:
    """Fetch, check and normalise all images of `job.raw` and put the result at `job.out` in one move.

    `on_row` is called after each row with the counts so far: images, fetched, cache_hits, bytes, set_aside.

    Raises:
        TooManyBadRowsError: nothing is published; what was fetched stays in the cache.
        S3AccessError: S3 refuses everything.
    """
    shutil.rmtree(job.work, ignore_errors=True)
    (job.work / "out" / "png").mkdir(parents=True)
    job.logs.mkdir(parents=True, exist_ok=True)
    before = read_quarantine(job.raw / "quarantine.jsonl")
    with Ledger(job.work / "ledger.sqlite") as ledger, FetchCache(job.cache) as cache:
        counts = _run(_Stage(job, ledger, cache, on_row))
        num_shared = ledger.set_aside_shared() if job.dedup_splits else 0
        reasons = ledger.reasons() + Counter(row.reason for row in before)
        report = ImageReport(
            num_rows=reasons.total(),
            num_kept=reasons.pop("", 0),
            num_shared=num_shared,
            reasons=dict(sorted(reasons.items())),
            num_fetched=counts["fetched"],
            num_cache_hits=counts["cache_hits"],
            num_bytes=counts["bytes"],
            num_images=counts["images"],
        )
        try:
            _check(report, job)
        except TooManyBadRowsError:
            write_quarantine(job.logs / "quarantine.jsonl", _all_set_aside(before, ledger))
            cache.forget_failures()
            raise
        _write(job, ledger, before)
    publish(job.work / "out", job.out)
    shutil.rmtree(job.work, ignore_errors=True)
    return report


@dataclass
class _Stage:
    """The concurrent part: rows in, outcomes into the ledger, memory bounded by the rows in flight."""

    job: ImageJob
    ledger: Ledger
    cache: FetchCache
    on_row: Callable[[Mapping[str, int]], None]

    async def run(self) -> Counter[str]:
        limits, pictures = self.job.images, self.job.raw / PICTURES
        async with AsyncExitStack() as stack:
            served: dict[str, tuple[str, int]] = {}
            if limits.serve_host is not None:
                served[limits.serve_host] = await stack.enter_async_context(
                    serve_directory(pictures)
                )
            fetcher = await stack.enter_async_context(Fetcher(limits, served))
            log = stack.enter_context(
                (self.job.logs / "fetch_log.jsonl").open("w", encoding="utf-8")
            )
            pool = stack.enter_context(ThreadPoolExecutor(limits.num_threads, "normalise"))
            acquirer = Acquirer(limits, pictures, self.cache, fetcher, log)
            room = asyncio.Semaphore(limits.concurrency * _ROWS_PER_SLOT)
            async with asyncio.TaskGroup() as tasks:
                for ordinal, row in enumerate(read_jsonl(self.job.raw / "problems.jsonl")):
                    await room.acquire()
                    task = tasks.create_task(self._row(ordinal, row, acquirer, pool))
                    task.add_done_callback(lambda _: room.release())
        return acquirer.counts

    async def _row(
        self, ordinal: int, row: dict[str, object], acquirer: Acquirer, pool: ThreadPoolExecutor
    ) -> None:
        outcomes = [
            await self._image(source, acquirer, pool) for source in cast("list[str]", row["images"])
        ]
        self.ledger.add(ordinal, row, outcomes)
        acquirer.counts["images"] += len(outcomes)
        if any(outcome.reason for outcome in outcomes):
            acquirer.counts["set_aside"] += 1
        self.on_row(acquirer.counts)

    async def _image(
        self, source: str, acquirer: Acquirer, pool: ThreadPoolExecutor
    ) -> ImageOutcome:
        shown = public_url(source)
        try:
            body = await acquirer.get(source)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, self._store, shown, body.data, body.sha256)
        except RowError as error:
            return ImageOutcome(shown, error.reason, error.detail)

    def _store(self, shown: str, data: bytes, sha256: str) -> ImageOutcome:
        return store_image(shown, data, sha256, self.job.images, self.job.work / "out" / "png")


def _run(stage: _Stage) -> Counter[str]:
    """Run the stage; the first error of a task is raised as itself, not in a group."""
    try:
        return asyncio.run(stage.run())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        raise error from None


def store_image(
    shown: str, data: bytes, sha256: str, limits: ImagesParams, png_dir: Path
) -> ImageOutcome:
    """Normalise one body and put its PNG into `png_dir`, named by its hash."""
    try:
        image = normalise(data, limits)
    except RowError as error:
        return ImageOutcome(shown, error.reason, error.detail, sha256, len(data))
    path = png_dir / f"{image.sha256}.png"
    if not path.exists():
        path.write_bytes(image.png)
    return ImageOutcome(
        url=shown,
        source_sha256=sha256,
        source_bytes=len(data),
        source_format=image.source.format,
        source_mode=image.source.mode,
        source_width=image.source.width,
        source_height=image.source.height,
        num_frames=image.source.num_frames,
        png_sha256=image.sha256,
        width=image.width,
        height=image.height,
    )


def _check(report: ImageReport, job: ImageJob) -> None:
    num_bad = report.num_rows - report.num_kept - report.num_shared
    limit = job.images.max_bad_fraction
    if num_bad <= limit * report.num_rows and report.num_kept:
        return
    raise TooManyBadRowsError(
        f"{num_bad} of {report.num_rows} rows cannot be used, images.max_bad_fraction is {limit:g}; "
        f"{job.logs / 'quarantine.jsonl'} lists them. Mend the dataset or raise the limit.\n{report.table()}"
    )


def _all_set_aside(before: list[SetAside], ledger: Ledger) -> Iterator[SetAside]:
    yield from before
    yield from ledger.set_aside()


def _write(job: ImageJob, ledger: Ledger, before: list[SetAside]) -> None:
    out = job.work / "out"
    ledger.write_manifest(out / "manifest.parquet")
    write_jsonl(out / "problems.jsonl", ledger.kept())
    write_quarantine(out / "quarantine.jsonl", _all_set_aside(before, ledger))
    if any(reason for reason in ledger.reasons()):
        for path in (out / "png").iterdir():
            if not ledger.is_needed(path.stem):
                path.unlink()
