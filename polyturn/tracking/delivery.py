"""Records of a run (outbox.py) as calls to MLflow, and which of its errors mean that it is away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from requests import RequestException

from polyturn.interrupts import held_back
from polyturn.tracking.outbox import PATH, AwayError, Record
from polyturn.tracking.store import Store, TrackingError, first_line, is_locked
from polyturn.types import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARAMS_PER_CALL = 100  # MLflow's limits of a batch
_METRICS_PER_CALL = 1000
_HTTP_ERROR = 500
_TOO_MANY = 429
_REFUSALS = ("AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DELETED = "must be in the 'active' state"  # what MLflow says of a run that somebody has deleted
_POLL_S = 1.0
# How PostgreSQL, SQLite and MySQL tell that a row is there already; MLflow passes it on as a bad request.
_CONFLICTS = ("UniqueViolation", "UNIQUE constraint failed", "Duplicate entry")
T = TypeVar("T")


class AwayTrackingError(AwayError, TrackingError):
    """MLflow, or the store of its artifacts, does not answer."""


class RefusedTrackingError(TrackingError):
    """MLflow refused."""


@contextlib.contextmanager
def speaking(store: Store) -> Iterator[None]:
    """Errors of MLflow and its artifact store as TrackingError: AwayTrackingError where trying again makes sense."""
    uri = store.addresses.uri
    try:
        yield
    except MlflowException as error:
        if store.addresses.database and is_locked(error):
            raise AwayTrackingError(f"tracking.uri {uri!r} is locked by another program") from None
        if store.addresses.database is None and is_away(error):
            raise AwayTrackingError(
                f"tracking.uri {uri!r} does not answer ({first_line(error)})"
            ) from None
        line = first_line(error)
        fix = (
            "it was deleted there meanwhile; start it again"
            if _DELETED in line
            else "look at its log, and run again"
        )
        raise RefusedTrackingError(
            f"tracking.uri {uri!r} stopped answering or refused ({line}); {fix}"
        ) from None
    except (Boto3Error, BotoCoreError, ClientError, RequestException) as error:
        if is_away(error):
            raise AwayTrackingError(
                f"the artifact store of {uri!r} does not answer ({first_line(error)})"
            ) from None
        raise RefusedTrackingError(
            f"tracking.artifact_location: the artifact store of {uri!r} refused ({first_line(error)}); check the "
            "bucket and its credentials"
        ) from None


def is_away(error: BaseException) -> bool:
    """Whether the other side may take the same request later: no connection, a timeout, or an error of its own."""
    if isinstance(error, MlflowException):
        # A connection that fails is an INTERNAL_ERROR of MLflow's own making.
        status = cast("int", error.get_http_status_code())
        return status >= _HTTP_ERROR or status == _TOO_MANY
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= _HTTP_ERROR or status == _TOO_MANY
    if isinstance(error, OSError) and not isinstance(error, RequestException):
        return isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, Boto3Error):  # an upload: the cause is in the text alone
        return not any(mark in str(error) for mark in _REFUSALS)
    return True


def is_conflict(error: MlflowException) -> bool:
    """Whether two clients wrote the same new row of the server's database at once, and this one came second."""
    return any(mark in str(error) for mark in _CONFLICTS)


def patiently(store: Store, call: Callable[[], T], wait_s: float) -> T:
    """Call until MLflow answers, for `wait_s` at most.

    Raises:
        TrackingError: it refused, or is away for longer.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            with speaking(store):
                return call()
        except AwayTrackingError:
            if time.monotonic() >= end:
                raise
            time.sleep(_POLL_S)


def deliver(store: Store, run_id: str, record: Record) -> None:
    """Send one record of a run.

    Raises:
        AwayTrackingError, RefusedTrackingError.
    """
    # A write to SQLite that an exception cuts in two leaves the database locked, also for the end of the run. A server
    # looks after its own, and may take longer to answer than somebody waits who ends this process.
    is_file = store.addresses.database is not None
    with speaking(store), held_back() if is_file else contextlib.nullcontext():
        _KINDS[str(record["kind"])](store, run_id, record)


def _params(store: Store, run_id: str, record: Record) -> None:
    flat = [Param(key, value) for key, value in _pairs(record)]
    for start in range(0, len(flat), _PARAMS_PER_CALL):
        store.client.log_batch(run_id, params=flat[start : start + _PARAMS_PER_CALL])


def _metrics(store: Store, run_id: str, record: Record) -> None:
    _log_metrics(store, run_id, _points(record))


def _series(store: Store, run_id: str, record: Record) -> None:
    """Metrics of several steps."""
    steps = cast("Sequence[Record]", record["steps"])
    _log_metrics(store, run_id, [point for step in steps for point in _points(step)])


def _points(record: Record) -> list[Metric]:
    items = cast("Mapping[str, float]", record["items"])
    at_ms, step = cast("int", record["at_ms"]), cast("int", record["step"])
    return [Metric(key, value, at_ms, step) for key, value in items.items()]


def _log_metrics(store: Store, run_id: str, metrics: Sequence[Metric]) -> None:
    for start in range(0, len(metrics), _METRICS_PER_CALL):
        store.client.log_batch(run_id, metrics=metrics[start : start + _METRICS_PER_CALL])


def _tags(store: Store, run_id: str, record: Record) -> None:
    store.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in _pairs(record)])


def _dataset(store: Store, run_id: str, record: Record) -> None:
    dataset = Dataset(
        str(record["name"]), str(record["digest"]), "local", source=str(record["source"])
    )
    tags = [InputTag(key, value) for key, value in _pairs(record)]
    store.client.log_inputs(run_id, [DatasetInput(dataset, tags)])


def _artifact(store: Store, run_id: str, record: Record) -> None:
    path, directory = Path(str(record[PATH])), cast("str | None", record["directory"])
    if path.is_dir():
        store.client.log_artifacts(run_id, str(path), directory or path.name)
    else:
        store.client.log_artifact(run_id, str(path), directory)


def _end(store: Store, run_id: str, record: Record) -> None:
    at_ms = cast("int", record["at_ms"])
    store.client.set_terminated(run_id, str(record["status"]), end_time=at_ms)


def _trace(store: Store, run_id: str, record: Record) -> None:
    from polyturn.tracking.traces import deliver_trace  # noqa: PLC0415  (its tracing is slow to load)

    deliver_trace(store, run_id, record)


def _pairs(record: Record) -> Sequence[tuple[str, str]]:
    items = cast("Mapping[str, Json]", record["items"])
    return [(key, str(value)) for key, value in items.items()]


_KINDS: Mapping[str, Callable[[Store, str, Record], None]] = {
    "params": _params,
    "metrics": _metrics,
    "series": _series,
    "tags": _tags,
    "dataset": _dataset,
    "artifact": _artifact,
    "trace": _trace,
    "end": _end,
}
