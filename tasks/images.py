"""Stage `images`: every picture of artifacts/raw fetched, checked and hashed -> artifacts/images."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping

from polyturn import layout
from polyturn.data.contact_sheet import draw_sheet, kept_tiles, set_aside_tiles
from polyturn.data.images import ImageJob, ImageReport, build_image_store
from polyturn.data.quarantine import read_quarantine
from polyturn.progress import Progress
from tasks.context import StageContext, run_stage

_SHEET_TILES = 36
_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Write artifacts/images: manifest.parquet, quarantine.jsonl, problems.jsonl, png/."""
    job = ImageJob(
        raw=layout.RAW,
        out=layout.IMAGES,
        work=ctx.work_dir / "store",
        cache=layout.STATE / "cache" / "images",
        logs=layout.STATE / "logs",
        images=ctx.params.images,
        dedup_splits=ctx.params.data.dedup_splits,
    )
    with (layout.RAW / "problems.jsonl").open("rb") as file:
        num_rows = sum(1 for _ in file)
    started = time.monotonic()
    with Progress(num_rows, "images") as progress:

        def show(counts: Mapping[str, int]) -> None:
            seconds = time.monotonic() - started
            num_images = counts["images"]
            progress.update(
                per_s=round(num_images / seconds, 1),
                mb=round(counts["bytes"] / 1e6, 1),
                cache_hits=counts["cache_hits"],
                set_aside=counts["set_aside"],
            )

        report = build_image_store(job, show)
    _record(ctx, report, seconds=time.monotonic() - started)


def _record(ctx: StageContext, report: ImageReport, *, seconds: float) -> None:
    manifest = layout.IMAGES / "manifest.parquet"
    with manifest.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    ctx.run.log_dataset("images", manifest, digest)
    ctx.run.log_metrics(
        {
            "images/rows": report.num_rows,
            "images/kept": report.num_kept,
            "images/set_aside": report.num_rows - report.num_kept,
            "images/shared_with_train": report.num_shared,
            "images/fetched": report.num_fetched,
            "images/cache_hits": report.num_cache_hits,
            "images/bytes": report.num_bytes,
            "images/images_per_s": report.num_images / seconds,
            **{f"images/reason/{reason}": count for reason, count in report.reasons.items()},
        }
    )
    _log_sheets(ctx)
    _log.info("%s", report.table())
    for row in read_quarantine(layout.IMAGES / "quarantine.jsonl")[:5]:
        _log.info("set aside: %s (%s): %s: %s", row.id, row.stage, row.reason, row.detail)


def _log_sheets(ctx: StageContext) -> None:
    """Contact sheets for a person, as artifacts of the run."""
    for name, tiles in (
        ("kept", kept_tiles(layout.IMAGES, _SHEET_TILES)),
        ("set_aside", set_aside_tiles(layout.IMAGES, _SHEET_TILES)),
    ):
        path = ctx.work_dir / f"{name}.png"
        path.write_bytes(draw_sheet(tiles))
        ctx.run.log_artifact(path, "images")


if __name__ == "__main__":
    run_stage("images", body)
