"""One MLflow run per stage (or pipeline): what is logged to it, and how it ends."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from polyturn.params import TrackingParams
from polyturn.tracking.environment import Environment, capture
from polyturn.tracking.orphans import close_orphans, owner_tags
from polyturn.tracking.store import Store, TrackingError, connect

logger = logging.getLogger(__name__)

_PARAMS_PER_CALL = 100  # MLflow's limit of a batch
_MAX_PARAM = 6000  # characters of a param's value
_MAX_TAG = 5000  # characters of a tag's value
_MAX_DIGEST = 36  # characters of a dataset's digest; a DVC directory md5 has exactly as many
_SIGTERM_CODE = 143  # 128 + SIGTERM, how a stage leaves when it is told to
_SIGINT_CODE = 130


class Run:
    """An open MLflow run. A failing call raises TrackingError after MLflow's own retries.

    MLflow allows no `@` in names: `pass@4` is written as `pass_at_4`.
    """

    def __init__(self, store: Store, run_id: str, artifact_uri: str) -> None:
        self.store = store
        self.run_id = run_id
        self.artifact_uri = artifact_uri

    @property
    def url(self) -> str:
        """The run's page on the server; for SQLite the part behind `#` goes after the address of `mlflow ui`."""
        return f"{self.store.addresses.uri}/#/experiments/{self.store.experiment_id}/runs/{self.run_id}"

    def tags(self) -> dict[str, str]:
        """The run's tags."""
        with self._speaking():
            return dict(self._client.get_run(self.run_id).data.tags)

    def log_params(self, params: Mapping[str, object] | BaseModel) -> None:
        """Log parameters; nested ones by dotted name, lists as JSON."""
        tree = params.model_dump(mode="json") if isinstance(params, BaseModel) else params
        flat = [Param(_name(key), value[:_MAX_PARAM]) for key, value in flatten(tree).items()]
        for start in range(0, len(flat), _PARAMS_PER_CALL):
            with self._speaking():
                self._client.log_batch(self.run_id, params=flat[start : start + _PARAMS_PER_CALL])

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> None:
        """Log all metrics of one step in one call; None and NaN (no measurement) are left out.

        `at_ms` is when the step was finished (Unix time; None: now). MLflow keeps one point of a name for equal
        step, time and value, so that a step sent twice stands in the history once.
        """
        now = int(time.time() * 1000) if at_ms is None else at_ms
        shown = [
            Metric(_name(key), float(value), now, step or 0)
            for key, value in metrics.items()
            if value is not None and not math.isnan(value)
        ]
        with self._speaking():
            self._client.log_batch(self.run_id, metrics=shown)

    def log_artifact(self, path: Path, directory: str | None = None) -> None:
        """Store a file, or a directory with what is in it, below the run's artifact `directory`."""
        with self._speaking():
            if path.is_dir():
                self._client.log_artifacts(self.run_id, str(path), directory or path.name)
            else:
                self._client.log_artifact(self.run_id, str(path), directory)

    def log_text(self, text: str, name: str) -> None:
        """Store text as the artifact file `name` (may hold folders)."""
        with self._speaking():
            self._client.log_text(self.run_id, text, name)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags; values are shown as text, cut at MLflow's limit."""
        with self._speaking():
            self._client.log_batch(
                self.run_id,
                tags=[RunTag(_name(key), str(value)[:_MAX_TAG]) for key, value in tags.items()],
            )

    def log_dataset(self, name: str, path: Path | str, digest: str) -> None:
        """Record that this run read the data at `path` (relative to the checkout) with that digest in dvc.lock."""
        source = json.dumps({"uri": str(path)})
        dataset = Dataset(name, digest[:_MAX_DIGEST], "local", source)
        tags = [InputTag("dvc.path", str(path)), InputTag("dvc.md5", digest)]
        with self._speaking():
            self._client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        with self._speaking():
            self._client.set_terminated(self.run_id, status)

    @property
    def _client(self) -> MlflowClient:
        return self.store.client

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            raise TrackingError(
                f"tracking.uri {self.store.addresses.uri!r} stopped answering or refused "
                f"({str(error).splitlines()[0][:300]}); start the server and run again"
            ) from None


def attach_run(tracking: TrackingParams, *, root: Path, run_id: str) -> Run:
    """The run that another process opened and will end.

    Raises:
        TrackingError: see `polyturn.tracking.store.connect`.
    """
    store = connect(tracking, root)
    try:
        found = store.client.get_run(run_id)
    except MlflowException as error:
        raise TrackingError(f"run {run_id} is not in {store.addresses.uri}: {error}") from None
    return Run(store, run_id, str(found.info.artifact_uri))


@contextlib.contextmanager
def open_run(
    tracking: TrackingParams,
    *,
    root: Path,
    name: str,
    stage: str | None = None,
    parent_run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Open a run of the configured experiment and end it by how the block ends.

    FINISHED on return and SystemExit(0); KILLED on KeyboardInterrupt and SystemExit(130 or 143), which is what SIGINT
    and SIGTERM become in a stage; else FAILED, with the error's class and message as tags. Git commit, uncommitted
    diff, installed versions and the machine are recorded at the start.

    Raises:
        TrackingError: see `polyturn.tracking.store.connect`.
    """
    store = connect(tracking, root)
    close_orphans(store)
    environment = capture(root)
    all_tags = {**_start_tags(environment, stage, parent_run_id), **(tags or {})}
    created = store.client.create_run(store.experiment_id, run_name=name, tags=all_tags)
    run = Run(store, str(created.info.run_id), str(created.info.artifact_uri))
    try:
        _log_environment(run, environment)
        yield run
    except BaseException as error:
        _end_after(run, error)
        raise
    run.end("FINISHED")


def end_status(error: BaseException) -> str:
    """The status of a run that ended by `error`."""
    if isinstance(error, KeyboardInterrupt):
        return "KILLED"
    if isinstance(error, SystemExit):
        if error.code in (_SIGTERM_CODE, _SIGINT_CODE):
            return "KILLED"
        return "FINISHED" if error.code in (None, 0) else "FAILED"
    return "FAILED"


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names; leaves as text, lists and empty mappings as JSON.

    >>> flatten({"train": {"lr": 0.1}, "betas": [0.9, 0.98]})
    {'train.lr': '0.1', 'betas': '[0.9, 0.98]'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(cast("Mapping[str, object]", value), f"{name}."))
        elif isinstance(value, str):
            flat[name] = value
        else:
            flat[name] = json.dumps(value, default=str)
    return flat


def _name(key: str) -> str:
    return key.replace("@", "_at_")


def _end_after(run: Run, error: BaseException) -> None:
    status = end_status(error)
    try:
        if status == "FAILED":
            run.set_tags({"error.class": type(error).__name__, "error.message": str(error)})
        run.end(status)
    except TrackingError as closing:
        logger.warning("run %s could not be closed as %s: %s", run.run_id, status, closing)


def _start_tags(
    environment: Environment, stage: str | None, parent_run_id: str | None
) -> dict[str, str]:
    tags = {
        **owner_tags(),
        "mlflow.user": _user(),
        "mlflow.source.name": " ".join(sys.argv)[:_MAX_TAG],
        "mlflow.source.type": "LOCAL",
        "git.dirty": str(bool(environment.diff)).lower(),
        "cpu.model": environment.cpu_model,
        "python": environment.python,
        **{f"version.{name}": version for name, version in environment.named_versions().items()},
    }
    if environment.commit:
        tags["mlflow.source.git.commit"] = environment.commit
    if environment.branch:
        tags["mlflow.source.git.branch"] = environment.branch
    if stage:
        tags["stage"] = stage
    if parent_run_id:
        tags["mlflow.parentRunId"] = parent_run_id
    return tags


def _log_environment(run: Run, environment: Environment) -> None:
    record = asdict(environment)
    diff = str(record.pop("diff"))
    with TemporaryDirectory() as directory:
        (Path(directory) / "environment.json").write_text(json.dumps(record, indent=1))
        if diff:
            (Path(directory) / "uncommitted.diff").write_text(diff)
        run.log_artifact(Path(directory), "environment")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
