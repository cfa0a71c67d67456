"""What every stage runs inside: params, lease, MLflow run, inputs watched, errors as one line and an exit code."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from polyturn import layout, params, processes, tracking
from polyturn.data.files import atomic_path
from polyturn.interrupts import held_back
from polyturn.params import Params
from polyturn.pipeline import lease
from polyturn.pipeline.checkout import main_checkout
from polyturn.policy import family
from polyturn.supported import check_supported
from polyturn.tracking import lineage
from tasks import failure, inputs

logger = logging.getLogger(__name__)

PARENT_RUN = "POLYTURN_PARENT_RUN_ID"  # MLflow run of the flow that started this stage
_FAMILY_GRACE_S = 2.0  # from SIGTERM to SIGKILL of what an ended stage has started

SUPERVISOR = "POLYTURN_SUPERVISOR"  # the flow's process: a stage does not outlive it


@dataclass(frozen=True)
class StageContext:
    """What a stage's body gets.

    `work_dir` is untracked, kept between runs, and exclusive while the stage runs. `cleanups` are called once the
    outputs are accepted (inputs unchanged), not if they are not; `held` is closed after that, in any case.
    """

    name: str
    params: Params
    run: tracking.Run
    work_dir: Path
    held: ExitStack = field(default_factory=ExitStack)
    cleanups: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


Body = Callable[[StageContext], None]


def run_stage(name: str, body: Body) -> NoReturn:
    """Run the body of stage `name` in the current checkout and exit.

    Exit codes: 0; 2 for what the user has to mend (not worth a retry); 1 for any other failure;
    143 or 130 when ended by SIGTERM or SIGINT. The outcome also goes to `status_file(name)`.
    """
    if given := sys.argv[1:]:
        sys.stderr.write(
            f"error: stage {name}: takes no arguments, got {' '.join(given)}; its values are those of {layout.PARAMS} "
            "(`polyturn use --set KEY=VALUE`)\n"
        )
        raise SystemExit(failure.USER_ERROR)
    try:
        log_to(layout.STATE / "logs" / f"{name}.log")
    except OSError as error:
        told = failure.explain(error).message
        sys.stderr.write(
            f"error: stage {name}: {told}; stages write below {Path.cwd() / layout.STATE}: run them as its owner\n"
        )
        raise SystemExit(failure.USER_ERROR) from None
    mark = family.join()
    outcome = failure.Outcome(0, "")
    try:
        with signals_end_it():
            _run(name, body)
    except (
        BaseException
    ) as error:  # the boundary: whatever happened becomes a line and an exit code
        outcome = failure.explain(error)
        logger.debug("stage %s", name, exc_info=True)
        for line in outcome.message.splitlines():
            logger.error("error: stage %s: %s", name, line)
    if outcome.exit_code in (failure.TERMINATED, failure.INTERRUPTED):
        family.end(mark, grace_s=_FAMILY_GRACE_S)
    write_json(status_file(name), {"exit_code": outcome.exit_code, "message": outcome.message})
    with suppress(OSError):  # nobody may read it any more
        sys.stdout.flush()
    gc.freeze()  # or the interpreter looks through all that is there, twice, before it ends
    raise SystemExit(outcome.exit_code)


def imports_are_done() -> None:
    """Collect garbage from now on, but not among the modules that are there: they stay."""
    gc.freeze()
    gc.enable()


def status_file(name: str) -> Path:
    """Where a stage leaves its exit code and message; dvc hides both from its caller."""
    return layout.STATE / "status" / f"{name}.json"


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def _run(name: str, body: Body) -> None:
    parent = _watch_parents(name)
    work_dir = layout.STATE / "work" / name
    with lease.hold(work_dir.with_suffix(".lock"), what=f"stage {name}", parent=parent):
        before = inputs.read(name)
        loaded = params.load(layout.PARAMS)
        check_supported(loaded)
        _check_disk(loaded.doctor.min_free_gb)
        work_dir.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with tracking.open_run(
            loaded.tracking,
            root=Path.cwd(),
            name=name,
            stage=name,
            parent_run_id=os.environ.get(PARENT_RUN),
        ) as run:
            run.log_params(loaded)
            _log_inputs(run, before)
            context = StageContext(name, loaded, run, work_dir)
            imports_are_done()
            with context.held:
                body(context)
                inputs.check_unchanged(before, inputs.read(name, known=before))
                for cleanup in context.cleanups:
                    cleanup()
        seconds = time.monotonic() - started
        _record_time(name, run_id=run.run_id, seconds=seconds)
        logger.info("stage %s done in %.1f s", name, seconds)


def _log_inputs(run: tracking.Run, declared: inputs.Inputs) -> None:
    """Name the stage's data with the digests that dvc.lock holds for them."""
    digests = lineage.lock_digests(layout.DVC_LOCK)
    for dep in declared.deps:
        if dep in digests and not dep.endswith(".py"):
            run.log_dataset(Path(dep).name, dep, digests[dep])


def _watch_parents(name: str) -> processes.Process | None:
    """Die with the dvc that runs the stage and the flow that runs dvc; return the former."""
    parent = processes.dvc_parent(name)
    last = partial(family.end, family.join(), grace_s=0)
    if parent:
        processes.die_with(parent, name="dvc", last=last)
    if supervisor := os.environ.get(SUPERVISOR):
        processes.die_with(processes.parse(supervisor), name="the flow", last=last)
    return parent


def _check_disk(min_free_gb: float) -> None:
    free_gb = shutil.disk_usage(".").free / 1e9
    if free_gb < min_free_gb:
        raise ValueError(
            f"doctor.min_free_gb: {min_free_gb:g} GB must be free on the disk of {Path.cwd()}, "
            f"{free_gb:.2f} GB are; free some space or lower the key"
        )


def _record_time(name: str, *, run_id: str, seconds: float) -> None:
    record = {
        "stage": name,
        "seconds": round(seconds, 2),
        "run_id": run_id,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # A worktree's own goes with it; the main checkout's is what the next plan knows.
    for root in {Path.cwd(), main_checkout(Path.cwd())}:
        path = root / layout.STATE / "timings.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@contextmanager
def signals_end_it() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that files and the MLflow run are left in order."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the way out must not be cut short
        raise failure.Terminated

    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


class _WholeLines(logging.Handler):
    """Holds signals back while it writes: one that raised after its lock is taken would leave it locked for ever."""

    def handle(self, record: logging.LogRecord) -> bool:
        with held_back():
            return super().handle(record)


class _FileHandler(_WholeLines, logging.FileHandler):
    """Writes a line to a file."""


class _ConsoleHandler(_WholeLines):
    """Writes a line to stderr without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except OSError:  # nobody reads any more: the flow or dvc has died
            self.handleError(record)


def log_to(path: Path, *, console: int = logging.INFO) -> None:
    """Send `console` and above to stderr and everything of polyturn, with tracebacks, to `path` (of the last run only)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = _ConsoleHandler(console)
    shown.setFormatter(logging.Formatter("%(message)s"))
    file = _FileHandler(path, mode="w")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[shown, file], force=True)
    for package in ("polyturn", "tasks", "plugins"):
        logging.getLogger(package).setLevel(logging.DEBUG)
    for chatty in (
        "httpx",
        "botocore",
    ):  # they tell of every request and where credentials are from
        logging.getLogger(chatty).setLevel(logging.WARNING)
