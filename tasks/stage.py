"""The one Prefect task: a stage of dvc.yaml, run by dvc in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from polyturn import processes
from polyturn.params import ParamsError
from polyturn.pipeline.dvc_objects import is_locked
from polyturn.pipeline.lease import LeaseError
from polyturn.pipeline.workspace import WorkspaceError
from polyturn.policy import family
from polyturn.progress import parse_line
from tasks.console import Console
from tasks.context import SUPERVISOR, status_file
from tasks.failure import FAILURE, Outcome
from tasks.progress_artifact import ProgressArtifact

_LOCK_WAIT_S = 120.0  # how long a lock that another dvc holds is waited for
_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_PARTING_S = 2.0  # in which what a stage has started ends by itself
# dvc's advice to the reader of a terminal
_NOISE = (
    "Generating lock file", "Updating lock file", "To track the changes with git", "git add ",
    "To enable auto staging", "dvc config core.autostage", "Use `dvc push`", "> python -m tasks.", "Data and pipelines are up to date",
)  # fmt: skip

Result = Literal["ran", "restored", "unchanged"]


@dataclass(frozen=True)
class StageReport:
    """What became of a stage: its command ran, its outs came from the cache, or nothing was stale."""

    stage: str
    result: Result
    seconds: float


class StageFailedError(RuntimeError):
    """A stage ended badly; `outcome` is what it left in its status file."""

    def __init__(self, stage: str, outcome: Outcome) -> None:
        super().__init__(f"stage {stage}: {outcome.message} (exit code {outcome.exit_code})")
        self.outcome = outcome


class _WithoutTraceback(logging.Filter):
    """These errors say all in their message; where the flow noticed them says nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        told = StageFailedError | ParamsError | WorkspaceError | LeaseError
        if record.exc_info and isinstance(record.exc_info[1], told):
            record.exc_info = None
        return True


for _name in ("prefect.task_runs", "prefect.flow_runs", "prefect.engine"):
    logging.getLogger(_name).addFilter(_WithoutTraceback())


def _is_worth_a_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.data
    return not isinstance(error, StageFailedError) or error.outcome.is_retryable


@task(
    name="dvc-stage",
    task_run_name="{stage}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=2,
    retry_condition_fn=_is_worth_a_retry,
)
def run_dvc_stage(stage: str, root: Path, env: Mapping[str, str]) -> StageReport:
    """Bring one stage up to date with `dvc repro --single-item` in the checkout `root`.

    `env` is laid over this process's environment. When the task ends, so does every process that the stage started.

    Raises:
        StageFailedError: the stage or dvc failed.
    """
    started = time.monotonic()
    while True:
        output = _repro(stage, root, env)
        if output.returncode == 0:
            return StageReport(stage, output.result, time.monotonic() - started)
        if not output.is_locked or time.monotonic() - started > _LOCK_WAIT_S:
            raise StageFailedError(stage, _outcome(root, stage, output))
        get_run_logger().info("another dvc works on an input or output of %s; waiting", stage)
        time.sleep(2)


@dataclass
class _Output:
    """What dvc's lines tell."""

    returncode: int = 0
    result: Result = "unchanged"
    is_locked: bool = False
    last_error: str = ""

    def read(self, line: str) -> None:
        if line.startswith("Running stage"):
            self.result = "ran"
        elif "is cached - skipping run" in line:
            self.result = "restored"
        elif line.startswith("ERROR:"):
            self.last_error = line.removeprefix("ERROR:").strip()
        self.is_locked = self.is_locked or is_locked(line)


def _repro(stage: str, root: Path, env: Mapping[str, str]) -> _Output:
    (root / status_file(stage)).unlink(missing_ok=True)
    console = Console(get_run_logger().info)
    progress = ProgressArtifact(stage)
    output = _Output()
    mark = family.new_mark()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dvc", "repro", "--single-item", stage],
        cwd=root,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # dvc.yaml says `python`
            **env,
            SUPERVISOR: str(processes.current()),
            family.MARK: mark,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        with _sweeping(process, stage, mark):
            assert process.stdout is not None
            for line in process.stdout:
                text = line.rstrip()
                output.read(text)
                if shown := parse_line(text):
                    console.progress(shown)
                    progress.show(shown)
                elif text.strip() and not text.strip().startswith(_NOISE):
                    console.line(text)
            output.returncode = process.wait()
    except BaseException:
        family.end(mark, grace_s=_GRACE_S)
        raise
    finally:
        console.close()
        progress.close()
    return output


@contextlib.contextmanager
def _sweeping(process: subprocess.Popen[str], stage: str, mark: str) -> Iterator[None]:
    """End what the stage leaves behind when dvc has ended: it would live on, and keep the output open for ever."""
    logger = get_run_logger()

    def sweep() -> None:
        process.wait()
        end = time.monotonic() + _PARTING_S
        while family.members(mark) and time.monotonic() < end:
            time.sleep(0.1)
        if left := family.end(mark, grace_s=_GRACE_S):
            pids = ", ".join(str(member.pid) for member in left)
            logger.warning("stage %s left processes behind (%s); they were ended", stage, pids)

    sweeper = threading.Thread(target=sweep, daemon=True)
    sweeper.start()
    yield
    sweeper.join()


def _outcome(root: Path, stage: str, output: _Output) -> Outcome:
    """The stage's own word if it left one, else dvc's."""
    path = root / status_file(stage)
    if path.is_file():
        status = json.loads(path.read_text())
        if status["exit_code"]:
            return Outcome(status["exit_code"], status["message"])
    return Outcome(FAILURE, output.last_error or f"dvc repro exited with {output.returncode}")
