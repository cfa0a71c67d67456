"""One MLflow run per stage (or pipeline): what is logged to it, and how it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from polyturn.params import TrackingParams
from polyturn.tracking.delivery import deliver, patiently, speaking
from polyturn.tracking.environment import Environment, capture
from polyturn.tracking.monitor import monitored
from polyturn.tracking.names import accepted, measured, shortened
from polyturn.tracking.orphans import close_orphans
from polyturn.tracking.outbox import Outbox, Record, leftovers
from polyturn.tracking.record import log_environment, start_tags
from polyturn.tracking.redact import redact
from polyturn.tracking.store import URI_VARIABLE, Store, TrackingError, connect

logger = logging.getLogger(__name__)

_MAX_PARAM = 6000  # characters of a param's value
_MAX_TAG = 5000  # characters of a tag's value
_MAX_DIGEST = 36  # characters of a dataset's digest; a DVC directory md5 has exactly as many
_SIGTERM_CODE = 143  # 128 + SIGTERM, how a stage leaves when it is told to
_SIGINT_CODE = 130
T = TypeVar("T")
_MLFLOW_URI = "MLFLOW_TRACKING_URI"  # of a user's shell; the address of a run stands in params.yaml
_REDACTED_TAG = "redacted"  # how many secrets were taken out of what was logged


class Run:
    """An open MLflow run.

    What is logged while the server is away waits in the run's outbox and gets there later; a server that refuses
    raises TrackingError. Secrets in params, tags and text are taken out. Names are written as MLflow accepts them:
    `pass@4` as `pass_at_4` (polyturn.tracking.names).
    """

    def __init__(self, store: Store, run_id: str, artifact_uri: str) -> None:
        self.store = store
        self.run_id = run_id
        self.artifact_uri = artifact_uri
        self.outbox = Outbox(store.outbox, store.addresses.uri, run_id, partial(deliver, store))
        self._num_redacted = 0
        self._infinite: set[str] = set()  # metrics that were told of

    @property
    def url(self) -> str:
        """The run's page on the server; for SQLite the part behind `#` goes after the address of `mlflow ui`."""
        return f"{self.store.addresses.uri}/#/experiments/{self.store.experiment_id}/runs/{self.run_id}"

    def tags(self) -> dict[str, str]:
        """The run's tags."""
        with speaking(self.store):
            return dict(self.store.client.get_run(self.run_id).data.tags)

    def parent_tags(self) -> dict[str, str]:
        """The tags of the pipeline run that this one is nested in; {} if there is none."""
        parent = self.tags().get("mlflow.parentRunId")
        if parent is None:
            return {}
        with speaking(self.store):
            return dict(self.store.client.get_run(parent).data.tags)

    def log_params(self, params: Mapping[str, object] | BaseModel) -> None:
        """Log parameters; nested ones by dotted name, lists as JSON."""
        tree = params.model_dump(mode="json") if isinstance(params, BaseModel) else params
        flat = {
            accepted(k): shortened(self._clean(v), _MAX_PARAM) for k, v in flatten(tree).items()
        }
        self.post({"kind": "params", "items": flat})

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> None:
        """Log all metrics of one step in one call; None and NaN (no measurement) are left out, as are infinite ones, with
        a warning: a database holds the largest finite number in their place.

        `at_ms` is when the step was finished (Unix time; None: now). MLflow keeps one point of a name for equal
        step, time and value, so that a step sent twice stands in the history once.
        """
        self.post(self.record_of(metrics, step, at_ms=at_ms))

    def record_of(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> Record:
        """What `log_metrics` posts."""
        now = int(time.time() * 1000) if at_ms is None else at_ms
        values = measured(metrics)
        shown = {key: value for key, value in values.items() if math.isfinite(value)}
        if new := values.keys() - shown.keys() - self._infinite:
            self._infinite |= new
            logger.warning("step %s: %s is infinite; MLflow does not get such values", step, ", ".join(sorted(new)))  # fmt: skip
        return {"kind": "metrics", "items": shown, "at_ms": now, "step": step or 0}

    def log_artifact(self, path: Path, directory: str | None = None) -> None:
        """Store a file, or a directory with what is in it, below the run's artifact `directory`."""
        self.post({"kind": "artifact", "path": str(path), "directory": directory})

    def log_text(self, text: str, name: str) -> None:
        """Store text as the artifact file `name` (may hold folders)."""
        target = Path(name)
        directory = None if target.parent == Path() else str(target.parent)
        with TemporaryDirectory() as scratch:
            path = Path(scratch) / target.name
            path.write_text(self._clean(text))
            self.log_artifact(path, directory)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags; values are shown as text, cut at MLflow's limit."""
        items = {
            accepted(key): shortened(self._clean(str(value)), _MAX_TAG)
            for key, value in tags.items()
        }
        self.post({"kind": "tags", "items": items})

    def log_dataset(self, name: str, path: Path | str, digest: str) -> None:
        """Record that this run read the data at `path` (relative to the checkout) with that digest in dvc.lock."""
        self.post(
            {
                "kind": "dataset",
                "name": name,
                "digest": digest[:_MAX_DIGEST],
                "source": json.dumps({"uri": str(path)}),
                "items": {"dvc.path": str(path), "dvc.md5": digest},
            }
        )

    def patiently(self, call: Callable[[], T], wait_s: float) -> T:
        """What cannot wait in the outbox: called again until the server answers, for `wait_s` at most.

        What was logged before is there when the call is made.

        Raises:
            TrackingError: it refused, or is away for longer.
        """
        self.outbox.wait(wait_s)
        return patiently(self.store, call, wait_s)

    def post(self, record: Record) -> None:
        """Send a record of polyturn.tracking.delivery, or keep it until the server answers.

        Raises:
            TrackingError: the server refuses it.
        """
        self.outbox.post(record)

    def end(self, status: str, *, wait_s: float = 0.0) -> None:
        """Close the run as FINISHED, FAILED or KILLED; a server that is still away is given `wait_s`."""
        if self._num_redacted:
            self.set_tags({_REDACTED_TAG: self._num_redacted})
        self.post({"kind": "end", "status": status, "at_ms": int(time.time() * 1000)})
        if self.outbox.is_waiting and not self.outbox.wait(wait_s):
            self.outbox.stop()
            logger.warning(
                "run %s: its end (%s) and what it logged while the server was away lie in %s; the next start of a "
                "stage delivers them",
                *(self.run_id, status, self.outbox.directory),
            )

    def _clean(self, text: str) -> str:
        found = redact(text)
        self._num_redacted += found.count
        return found.text


def attach_run(tracking: TrackingParams, *, root: Path, run_id: str) -> Run:
    """The run that another process opened and will end; a server that is away is waited for.

    Raises:
        TrackingError: see `polyturn.tracking.store.connect`.
    """
    store = connect(tracking, root, wait_s=tracking.outage_s)
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
    diff, installed versions and the machine are recorded at the start, use of CPU, memory and GPUs throughout. What
    dead processes of this host left is delivered and closed first.

    Raises:
        TrackingError: the server was away for longer than tracking.outage_s; else see
            `polyturn.tracking.store.connect`.
    """
    store = connect(tracking, root, wait_s=tracking.outage_s)
    _tell_of_ignored(store.addresses.uri)
    leftovers(store.outbox, store.addresses.uri, partial(deliver, store))
    patiently(store, lambda: close_orphans(store), tracking.outage_s)
    environment = capture(root)
    all_tags = {**start_tags(environment, stage, parent_run_id), **(tags or {})}
    created = patiently(
        store,
        lambda: store.client.create_run(store.experiment_id, run_name=name, tags=all_tags),
        tracking.outage_s,
    )
    run = Run(store, str(created.info.run_id), str(created.info.artifact_uri))
    try:
        _log_start(run, environment, root)
        with monitored(run.log_metrics, run.set_tags, tracking.system_metrics_s):
            yield run
    except BaseException as error:
        _end_after(run, error, tracking.outage_s)
        raise
    _end(run, "FINISHED", tracking.outage_s)


def _tell_of_ignored(uri: str) -> None:
    named = os.environ.get(_MLFLOW_URI, "").rstrip("/")
    if named and named != uri:
        logger.warning("%s is ignored: runs go to tracking.uri %s; %s goes before it", _MLFLOW_URI, uri, URI_VARIABLE)  # fmt: skip


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


def _end_after(run: Run, error: BaseException, wait_s: float) -> None:
    status = end_status(error)
    try:
        if status == "FAILED":
            run.set_tags({"error.class": type(error).__name__, "error.message": str(error)})
        # Who is told to go has seconds left.
        _end(run, status, 0.0 if status == "KILLED" else wait_s)
    except TrackingError as closing:
        logger.warning("run %s could not be closed as %s: %s", run.run_id, status, closing)


def _end(run: Run, status: str, wait_s: float) -> None:
    run.end(status, wait_s=wait_s)
    if not run.outbox.is_waiting:
        # A rank of the run may have ended while the server was away.
        leftovers(run.store.outbox, run.store.addresses.uri, partial(deliver, run.store))


def _log_start(run: Run, environment: Environment, root: Path) -> None:
    log_environment(run, environment, root)
