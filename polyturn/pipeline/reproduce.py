"""`polyturn reproduce RUN_ID`: run a past pipeline run again from what MLflow recorded, and say what came out the same."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from polyturn import layout, params
from polyturn.params import TrackingParams
from polyturn.params_tree import read_tree
from polyturn.pipeline import reproduction, workspace
from polyturn.pipeline.bootstrap import command_environment
from polyturn.pipeline.checkout import from_checkout
from polyturn.pipeline.reproduction import Change, FirstDifference, Row
from polyturn.tracking import histories, lineage, recorded
from polyturn.tracking.environment import capture
from polyturn.tracking.recorded import Recorded
from polyturn.tracking.run import open_run
from polyturn.tracking.store import ARTIFACTS_VARIABLE, URI_VARIABLE, Store, connect, in_file

logger = logging.getLogger(__name__)

# A flow's or another run's addresses must not reach the stages that run here.
_NOT_INHERITED = ("POLYTURN_PARENT_RUN_ID", "POLYTURN_SUPERVISOR", ARTIFACTS_VARIABLE)
_RAW = str(layout.RAW)


class ReproduceError(ValueError):
    """A run cannot be run again here; the message says what is missing."""


@dataclass(frozen=True)
class StageRun:
    """One stage command that was run again; `is_restored`: its out was taken by digest, as its source is gone."""

    stage: str
    seconds: float
    is_restored: bool = False


@dataclass(frozen=True)
class Reproduction:
    """What came of it; `worktree` is None once it is removed."""

    recorded: Recorded
    stages: Sequence[StageRun]
    rows: Sequence[Row]  # digests
    numbers: Sequence[Row]  # of metrics.json
    curve: FirstDifference | None
    num_curves: int  # metrics whose histories were compared
    changes: Sequence[Change]  # of the environment
    worktree: Path | None

    @property
    def is_same(self) -> bool:
        """Whether every digest, number and step is."""
        rows = [*self.rows, *self.numbers]
        return bool(self.rows) and all(row.is_same for row in rows) and self.curve is None


def run(run_id: str, root: Path, *, keeps_worktree: bool) -> Reproduction:
    """Run everything again in a worktree of the run's commit, with a store and a registry of its own.

    The worktree stays where something differs, or where it is asked for. The outcome goes to runs/reproduce-ID/, and as
    a run of its own to the store that the record came from.

    Raises:
        RecordError: the store has no such run, or too little of it.
        ReproduceError: diff, data or a stage fails; the worktree is left for a look.
        WorkspaceError: the commit is not to be had.
    """
    loaded = params.load(root / layout.PARAMS)
    store = connect(loaded.tracking, root)
    record = recorded.read(store, run_id)
    logger.info("%s: commit %s, %s", record.name, record.commit[:12], _diff_size(record))
    changes = reproduction.environment_changes(record.environment, asdict(capture(root)))
    logger.info("environment: %s", f"{len(changes)} differences" if changes else "as recorded")
    kept = root / "runs" / f"reproduce-{run_id[:8]}"
    kept.mkdir(parents=True, exist_ok=True)
    worktree = _prepare(record, root)
    stages = _run_stages(record, worktree, kept / "log.txt")
    found = _compare(record, store, stages, changes, worktree)
    if found.is_same and not keeps_worktree:
        workspace.remove(root, worktree)
        found = Reproduction(**{**vars(found), "worktree": None})
    return found


def publish(found: Reproduction, text: str, tracking: TrackingParams, root: Path) -> Path:
    """Write the outcome to runs/reproduce-ID/ and to the store; returns the directory."""
    run_id = found.recorded.run_id
    kept = root / "runs" / f"reproduce-{run_id[:8]}"
    (kept / "reproduce.md").write_text(text)
    tags = {"reproduces": run_id, "reproduced": str(found.is_same).lower()}
    with open_run(
        tracking, root=root, name=f"reproduce {found.recorded.name}", stage="reproduce", tags=tags
    ) as opened:
        for name in ("reproduce.md", "log.txt"):
            opened.log_artifact(kept / name)
    return kept


def _prepare(record: Recorded, root: Path) -> Path:
    """The worktree: commit, diff, params (`never`, an empty work_uri), data by digest."""
    name = f"reproduce-{record.run_id[:8]}"
    worktree = workspace.add_worktree(root, name, record.commit)
    if record.diff:
        _apply(record, worktree)
    for path in record.untracked:
        logger.warning("%s was there, unknown to git, and is not in the record", path)
    (worktree / layout.PARAMS).write_text(record.params)
    work = worktree / layout.STATE / "reproduce-work"
    workspace.write_params(worktree, {"train": {"resume": "never", "work_uri": str(work)}})
    # The worktree's own polyturn knows the keys of its params.yaml; the one that runs here may be another version's.
    _python(
        worktree,
        "from pathlib import Path; from polyturn.pipeline.bootstrap import bootstrap; bootstrap(Path.cwd())",
    )
    _restore_tracked(worktree)
    return worktree


def _apply(record: Recorded, worktree: Path) -> None:
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=worktree,
        input=record.diff.encode(errors="surrogateescape"),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        why = " (secrets were taken out of it when it was recorded)" if record.is_redacted else ""
        raise ReproduceError(
            f"the uncommitted diff of run {record.run_id} does not apply to its commit{why}: "
            f"{' '.join(done.stderr.decode(errors='replace').split())[:400]}; worktree {worktree}"
        )


def _restore_tracked(worktree: Path) -> None:
    """Bring what .dvc files name by digest from the cache, or else from the remote."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "*.dvc"], cwd=worktree, text=True)
    files = [name for name in listed.split("\0") if Path(name).suffix == ".dvc" and Path(name).stem]
    if files:
        _dvc(worktree, "pull", *files, purpose="restore the data of .dvc files")


def _run_stages(record: Recorded, worktree: Path, log: Path) -> list[StageRun]:
    stages = list(cast("Mapping[str, object]", read_tree(worktree / layout.DVC_YAML)["stages"]))
    done: list[StageRun] = []
    log.write_text("")
    if _is_source_gone(worktree):
        done.append(_restore_raw(record, worktree))
        stages = [stage for stage in stages if stage != done[0].stage]
    for stage in stages:
        started = time.monotonic()
        _run_stage(stage, worktree, log)
        done.append(StageRun(stage, time.monotonic() - started))
        logger.info("ran stage %s in %.1f s", stage, done[-1].seconds)
    return done


def _run_stage(stage: str, worktree: Path, log: Path) -> None:
    """`dvc repro` of one stage, whatever is cached; its output goes to the log.

    Raises:
        ReproduceError: it failed, or its command did not run.
    """
    env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    env |= command_environment() | {URI_VARIABLE: f"sqlite:///{worktree / 'mlflow.db'}"}
    command = [
        sys.executable,
        "-m",
        "dvc",
        "repro",
        "--single-item",
        "--force",
        "--no-run-cache",
        stage,
    ]
    start = log.stat().st_size
    with log.open("a") as file:
        code = subprocess.call(
            command, cwd=worktree, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    said = log.read_bytes()[start:].decode(errors="replace")
    if code or f"Running stage '{stage}'" not in said:
        raise ReproduceError(
            f"stage {stage} {'failed' if code else 'did not run'}; see {log} and the worktree {worktree}: "
            f"{next((line for line in said.splitlines() if line.startswith('error: ')), '')}"
        )


def _is_source_gone(worktree: Path) -> bool:
    """Whether data.path names a local file or directory that is not here."""
    data = cast("Mapping[str, object]", read_tree(worktree / layout.PARAMS).get("data", {}))
    path = data.get("path")
    is_local = isinstance(path, str) and (path.startswith(("/", ".")) or path.count("/") != 1)
    if not is_local or "://" in str(path):
        return False
    found = from_checkout(str(path), worktree)
    return not (worktree / found).exists()


def _restore_raw(record: Recorded, worktree: Path) -> StageRun:
    """The rows as they were recorded, by digest from cache or remote, where their source is not here any more."""
    started = time.monotonic()
    stage = next((s for s, outs in record.outs.items() if _RAW in outs), None)
    if stage is None:
        raise ReproduceError(
            f"data.path of run {record.run_id} is not here, and its dvc.lock names no digest of {_RAW}"
        )
    (worktree / layout.DVC_LOCK).write_text(record.lock)
    _dvc(worktree, "pull", _RAW, purpose=f"restore {_RAW} by its digest, as data.path is not here")
    logger.info("restored %s by digest, as data.path is not here", _RAW)
    return StageRun(stage, time.monotonic() - started, is_restored=True)


def _compare(
    record: Recorded,
    store: Store,
    stages: Sequence[StageRun],
    changes: Sequence[Change],
    worktree: Path,
) -> Reproduction:
    ran = {stage.stage for stage in stages}
    outs = lineage.outs_by_stage((worktree / layout.DVC_LOCK).read_text())
    now = {stage: found for stage, found in outs.items() if stage in ran}
    rows = reproduction.digest_rows(record.outs, now)
    metrics = json.loads((worktree / layout.METRICS).read_text())
    numbers = reproduction.metric_rows(record.metrics, metrics)
    # The worktree's own store: reproducing registers nothing in the team's.
    again = in_file(worktree / "mlflow.db")
    train_run = json.loads((worktree / layout.TRAIN_RUN).read_text())["run_id"]
    tags = again.client.get_run(train_run).data.tags
    key = "weights.sha256"
    rows.append(Row("train", key, record.tags.get(key, ""), tags.get(key, "")))
    old_run = record.stages.get("train", "")
    names = reproduction.compared_metrics(
        sorted({*histories.names(store, old_run), *histories.names(again, train_run)})
    )
    curve = reproduction.first_difference(
        histories.read(store, old_run, names), histories.read(again, train_run, names)
    )
    return Reproduction(record, stages, rows, numbers, curve, len(names), changes, worktree)


def _diff_size(record: Recorded) -> str:
    files = record.diff.count("\ndiff --git ") + record.diff.startswith("diff --git ")
    return f"{files} uncommitted files" if files else "no uncommitted edits"


def _dvc(worktree: Path, *arguments: str, purpose: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=worktree,
        env={**os.environ, **command_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReproduceError(
            f"cannot {purpose}: neither cache nor remote has it ({' '.join(done.stderr.split())[:400]})"
        )


def _python(worktree: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=worktree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReproduceError(
            f"the worktree {worktree} cannot be set up: {done.stderr.strip().splitlines()[-1:]}"
        )
