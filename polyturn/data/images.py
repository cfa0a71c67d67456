"""The images stage: every image of every row becomes a checked, hashed PNG, or its row is set aside."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyturn import directories
from polyturn.data.cache import FetchCache
from polyturn.data.files import write_jsonl
from polyturn.data.ledger import Ledger
from polyturn.data.processing import (
    Emit,
    ImageJob,
    RowResult,
    process_rows,
    read_rows,
    run_tasks,
    serve_pictures,
)
from polyturn.data.quarantine import (
    SetAside,
    read_quarantine,
    reason_table,
    write_quarantine,
)
from polyturn.params import ParamsError

_log = logging.getLogger(__name__)
__all__ = ["ImageJob", "ImageReport", "TooManyBadRowsError", "build_image_store"]


class TooManyBadRowsError(ValueError):
    """More rows than images.max_bad_fraction were set aside; the message holds the table of reasons."""


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
    job.png_dir.mkdir(parents=True)
    job.logs.mkdir(parents=True, exist_ok=True)
    before = read_quarantine(job.raw / "quarantine.jsonl")
    with Ledger(job.work / "ledger.sqlite") as ledger, FetchCache(job.cache) as cache:
        counts = _process(job, ledger, cache, on_row)
        num_shared = ledger.set_aside_shared() if job.dedup_splits else 0
        report = _report(counts, ledger.reasons(), before, num_shared)
        if _has_too_many(report, job.images.max_bad_fraction):
            bad = list(_all_set_aside(before, ledger))
            write_quarantine(job.logs / "quarantine.jsonl", bad)
            cache.forget_failures()
            raise TooManyBadRowsError(_complaint(report, job, bad))
        _write(job, ledger, before)
    directories.replace(job.work / "out", job.out)
    shutil.rmtree(job.work, ignore_errors=True)
    return report


def _process(
    job: ImageJob, ledger: Ledger, cache: FetchCache, on_row: Callable[[Mapping[str, int]], None]
) -> Counter[str]:
    """Run all rows through the engine into the ledger; returns the counts."""
    counts: Counter[str] = Counter()

    def emit(done: RowResult) -> None:
        ledger.add(done.ordinal, done.row, done.outcomes)
        counts.update(done.counts)
        counts["images"] += len(done.outcomes)
        counts["set_aside"] += any(outcome.reason for outcome in done.outcomes)
        on_row(counts)

    _engine(job, cache)(emit)
    if counts["wrong_types"]:
        _log.warning(
            "%d data: URIs name another type than their content has; the content counts",
            counts["wrong_types"],
        )
    return counts


def _report(
    counts: Counter[str], reasons: Counter[str], before: list[SetAside], num_shared: int
) -> ImageReport:
    by_reason = reasons + Counter(row.reason for row in before)
    return ImageReport(
        num_rows=by_reason.total(),
        num_kept=by_reason.pop("", 0),
        num_shared=num_shared,
        reasons=dict(sorted(by_reason.items())),
        num_fetched=counts["fetched"],
        num_cache_hits=counts["cache_hits"],
        num_bytes=counts["bytes"],
        num_images=counts["images"],
    )


def _engine(job: ImageJob, cache: FetchCache) -> Callable[[Emit], None]:
    """The function that processes all rows and emits their results.

    Raises:
        ParamsError: images.engine is ray and Ray is not installed.
    """
    if job.images.engine == "local":
        return lambda emit: run_tasks(_run_local(job, cache, emit))
    try:
        # An optional engine, in an extra of its own.
        from polyturn.data.ray_engine import run_on_ray  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ParamsError(
            f"images.engine: ray needs module {error.name!r}; install polyturn[ray] or set engine: local"
        ) from None
    return lambda emit: run_on_ray(job, emit)


async def _run_local(job: ImageJob, cache: FetchCache, emit: Emit) -> None:
    """Process all rows in this process."""
    (job.logs / "fetch_log.jsonl").unlink(missing_ok=True)
    async with serve_pictures(job) as served:
        await process_rows(
            job, read_rows(job), served, cache=cache, emit=emit, log_name="fetch_log.jsonl"
        )


def _has_too_many(report: ImageReport, limit: float) -> bool:
    num_bad = report.num_rows - report.num_kept - report.num_shared
    return num_bad > limit * report.num_rows or not report.num_kept


def _complaint(report: ImageReport, job: ImageJob, bad: Sequence[SetAside]) -> str:
    """What is wrong, with a row of the most frequent reason: its detail says what to do."""
    reasons = Counter(row.reason for row in bad)
    first = max(bad, key=lambda row: reasons[row.reason], default=None)
    return (
        f"{report.num_rows - report.num_kept - report.num_shared} of {report.num_rows} rows cannot be used, "
        f"images.max_bad_fraction is {job.images.max_bad_fraction:g}; {job.logs / 'quarantine.jsonl'} lists them. "
        f"Mend the dataset or raise the limit.\n{report.table()}"
        + (f"\nfor example {first.id}: {first.reason}: {first.detail}" if first else "")
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
