"""The images stage, run on a few rows in a directory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn.data.files import read_jsonl, write_jsonl
from polyturn.data.images import ImageJob, ImageReport, build_image_store
from polyturn.data.quarantine import SetAside, read_quarantine, write_quarantine
from polyturn.params import ImagesParams


@dataclass(frozen=True)
class Stored:
    """A finished images stage."""

    out: Path
    report: ImageReport
    rows: list[dict[str, object]]
    set_aside: dict[str, SetAside]

    @property
    def kept(self) -> list[object]:
        return [row["id"] for row in self.rows]


@dataclass(frozen=True)
class Stage:
    """The images stage in a directory of its own; the cache stays between runs."""

    root: Path

    def raw(self, rows: Sequence[dict[str, object]], before: Sequence[SetAside] = ()) -> Path:
        raw = self.root / "raw"
        (raw / "pictures").mkdir(parents=True, exist_ok=True)
        lines = [
            {"split": "train", "problem": "", "answer": "1", "metadata": {}, **row} for row in rows
        ]
        write_jsonl(raw / "problems.jsonl", lines)
        write_quarantine(raw / "quarantine.jsonl", before)
        return raw

    def job(self, *, dedup_splits: bool = True, **images: object) -> ImageJob:
        return ImageJob(
            raw=self.root / "raw",
            out=self.root / "images",
            work=self.root / "work",
            cache=self.root / "cache",
            logs=self.root / "logs",
            images=ImagesParams.model_validate(
                {
                    "allow_hosts": ("127.0.0.1",),
                    "backoff_s": 0.01,
                    "max_bad_fraction": 1.0,
                    "retries": 2,
                    **images,
                }
            ),
            dedup_splits=dedup_splits,
        )

    def run(self, sources: dict[str, str | list[str]], **images: object) -> Stored:
        """Run over rows named by the keys, each with its source or sources."""
        self.raw(
            [
                {"id": name, "images": [source] if isinstance(source, str) else source}
                for name, source in sources.items()
            ]
        )
        return self.finish(self.job(**images))

    def finish(self, job: ImageJob) -> Stored:
        report = build_image_store(job)
        rows = list(read_jsonl(job.out / "problems.jsonl"))
        set_aside = {row.id: row for row in read_quarantine(job.out / "quarantine.jsonl")}
        return Stored(job.out, report, rows, set_aside)
