"""The stages fetch and images end to end: files, metrics, digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polyturn import layout
from polyturn.data import read_problems
from polyturn.params import Params, parse
from tasks import fetch, images
from tasks.context import StageContext


@dataclass
class Recorder:
    """A tracking run that keeps what it is told."""

    metrics: dict[str, float] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    tags: dict[str, object] = field(default_factory=dict)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics

    def log_dataset(self, name: str, path: Path, digest: str) -> None:
        self.datasets[name] = digest

    def log_artifact(self, path: Path, directory: str | None = None) -> None:
        self.artifacts.append(f"{directory}/{path.name}")

    def set_tags(self, tags: dict[str, object]) -> None:
        self.tags |= tags


def _run(params: Params, recorder: Recorder) -> None:
    for name, body in (("fetch", fetch.body), ("images", images.body)):
        work = layout.STATE / "work" / name
        work.mkdir(parents=True, exist_ok=True)
        body(StageContext(name, params, recorder, work))  # pyright: ignore[reportArgumentType]


def test_two_stages_turn_params_into_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params = parse({"data": {"num_train": 12, "num_validation": 3, "num_test": 4}})
    recorder = Recorder()
    _run(params, recorder)
    problems = read_problems(layout.IMAGES / "problems.jsonl", layout.IMAGES)
    assert [problem.split for problem in problems] == ["train"] * 12 + ["validation"] * 3 + [
        "test"
    ] * 4
    for problem in problems:
        [image] = problem.images
        assert (image.width, image.height) == (256, 256)
        assert hashlib.sha256(image.read()).hexdigest() == image.sha256
    manifest = layout.IMAGES / "manifest.parquet"
    assert recorder.datasets == {"images": hashlib.sha256(manifest.read_bytes()).hexdigest()}
    assert recorder.metrics["data/train"] == 12
    assert (recorder.metrics["images/kept"], recorder.metrics["images/fetched"]) == (19, 19)
    assert recorder.metrics["images/images_per_s"] > 0
    assert recorder.artifacts == ["images/kept.png", "images/set_aside.png"]
    first = {
        p: p.read_bytes() for d in (layout.RAW, layout.IMAGES) for p in d.rglob("*") if p.is_file()
    }
    _run(params, recorder)
    assert {
        p: p.read_bytes() for d in (layout.RAW, layout.IMAGES) for p in d.rglob("*") if p.is_file()
    } == first
    assert (recorder.metrics["images/fetched"], recorder.metrics["images/cache_hits"]) == (0, 19)
    assert sorted(p.name for p in layout.IMAGES.iterdir()) == [
        "manifest.parquet",
        "png",
        "problems.jsonl",
        "quarantine.jsonl",
    ]
