"""Stage `fetch`: the rows of data.source, checked, with stable picture sources -> artifacts/raw."""

from __future__ import annotations

import logging
import shutil
from collections import Counter

from polyturn import directories, layout
from polyturn.data.geo3k import HubSource
from polyturn.data.raw import RawReport, RawWriter
from polyturn.data.sources import SPLITS, counts, load_source
from polyturn.params import DataParams
from polyturn.progress import Progress
from polyturn.reward import parse_reference
from tasks.context import StageContext, run_stage

_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Write artifacts/raw: problems.jsonl, quarantine.jsonl, pictures/."""
    data, images = ctx.params.data, ctx.params.images
    built = ctx.work_dir / "raw"
    shutil.rmtree(built, ignore_errors=True)
    source = load_source(data, images, seed=ctx.params.seed, work_dir=ctx.work_dir)
    with Progress(_num_wanted(data), "rows") as progress:
        report = RawWriter(
            built,
            source,
            data,
            images.serve_host,
            parse_answer=parse_reference,
            on_row=progress.update,
        ).write()
    if isinstance(source, HubSource):
        ctx.run.set_tags({"data.commit": source.revision})
    directories.replace(built, layout.RAW)
    _record(ctx, report)


def _num_wanted(data: DataParams) -> int:
    """Rows asked for; 0 (an open end) if a split is taken whole."""
    wanted = [count for count in counts(data).values() if count is not None]
    return sum(wanted) if len(wanted) == len(SPLITS) else 0


def _record(ctx: StageContext, report: RawReport) -> None:
    reasons = Counter(row.reason for row in report.set_aside)
    ctx.run.log_metrics(
        {
            **{f"data/{split}": count for split, count in report.kept.items()},
            "data/set_aside": len(report.set_aside),
            "data/image_tags_added": report.num_tags_added,
            **{f"data/reason/{reason}": count for reason, count in sorted(reasons.items())},
        }
    )
    kept = ", ".join(f"{count} {split}" for split, count in report.kept.items())
    _log.info(
        "fetch: %s rows; %d set aside %s",
        kept,
        len(report.set_aside),
        dict(sorted(reasons.items())),
    )


if __name__ == "__main__":
    run_stage("fetch", body)
