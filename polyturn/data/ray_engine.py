"""images.engine: ray - the same rows and the same function on Ray Data.

A cluster of several machines needs `job.raw`, `job.work` and the fetch cache on a disk that all of them see,
and no served host, since the loopback server runs beside the driver.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import ray
import ray.data

from polyturn.data.cache import FetchCache
from polyturn.data.files import write_jsonl
from polyturn.data.outcome import ImageOutcome
from polyturn.data.processing import (
    Emit,
    ImageJob,
    RowResult,
    Served,
    process_rows,
    read_rows,
    run_tasks,
    serve_pictures,
)
from polyturn.data.s3 import S3AccessError

_ROWS_PER_BLOCK = 256
Column = dict[str, npt.NDArray[np.object_]]


def run_on_ray(job: ImageJob, emit: Emit) -> None:
    """Process all rows on the cluster of RAY_ADDRESS, or on a local one that ends with the run.

    Raises:
        S3AccessError: S3 refuses everything.
        ray.exceptions.RayError: a worker fails; its error is the cause.
    """
    job = replace(
        job,
        raw=job.raw.resolve(),
        work=job.work.resolve(),
        cache=job.cache.resolve(),
        logs=job.logs.resolve(),
        # An actor is a process of its own already.
        images=job.images.model_copy(update={"num_processes": 0}),
    )
    blocks = _write_blocks(job)
    was_running = ray.is_initialized()
    if not was_running:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        with _served(job) as served:
            results = ray.data.read_text(
                [str(path) for path in blocks], override_num_blocks=len(blocks)
            )
            done = results.map_batches(
                _Batches,
                fn_constructor_args=(job, served),
                batch_size=_ROWS_PER_BLOCK,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=os.cpu_count() or 1),
            )
            for row in done.iter_rows():
                emit(_result(cast("Mapping[str, str]", row)["result"]))
    finally:
        if not was_running:
            ray.shutdown()


def _write_blocks(job: ImageJob) -> list[Path]:
    """Numbered rows in files of a few hundred, the unit of work that Ray hands out."""
    rows = read_rows(job)
    paths: list[Path] = []
    while block := list(itertools.islice(rows, _ROWS_PER_BLOCK)):
        paths.append(job.work / "blocks" / f"{len(paths):06d}.txt")
        write_jsonl(paths[-1], ({"ordinal": ordinal, "row": row} for ordinal, row in block))
    return paths


class _Batches:
    """An actor that turns batches of numbered rows into results, both as JSON lines."""

    def __init__(self, job: ImageJob, served: Served) -> None:
        self._job = job
        self._served = served

    def __call__(self, batch: Column) -> Column:
        lines = [cast("dict[str, object]", json.loads(str(text))) for text in batch["text"]]
        rows = [
            (cast("int", line["ordinal"]), cast("dict[str, object]", line["row"])) for line in lines
        ]
        results: list[str] = []

        def emit(result: RowResult) -> None:
            line = {
                "ordinal": result.ordinal,
                "row": result.row,
                "outcomes": [asdict(outcome) for outcome in result.outcomes],
                "counts": dict(result.counts),
            }
            results.append(json.dumps(line))

        # Ray may call from another thread each time, and the cache belongs to one.
        with FetchCache(self._job.cache) as cache:
            log_name = f"fetch_log.{os.getpid()}.jsonl"
            work = process_rows(
                self._job, rows, self._served, cache=cache, emit=emit, log_name=log_name
            )
            try:
                run_tasks(work)
            except S3AccessError as error:
                results.append(json.dumps({"stop": str(error)}))
        return {"result": np.array(results, dtype=object)}


def _result(text: str) -> RowResult:
    fields = cast("dict[str, object]", json.loads(text))
    if "stop" in fields:
        raise S3AccessError(str(fields["stop"]))
    outcomes = cast("list[dict[str, str]]", fields["outcomes"])
    return RowResult(
        ordinal=cast("int", fields["ordinal"]),
        row=cast("dict[str, object]", fields["row"]),
        outcomes=[ImageOutcome(**outcome) for outcome in outcomes],  # pyright: ignore[reportArgumentType]
        counts=cast("dict[str, int]", fields["counts"]),
    )


@contextmanager
def _served(job: ImageJob) -> Iterator[Served]:
    """The loopback server in a thread of its own, since the driver's loop belongs to Ray."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = serve_pictures(job)
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
