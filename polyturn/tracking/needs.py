"""Which MLflow runs, and which of DVC's objects, somebody still needs: the champion, the last ones, what is pinned."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mlflow.artifacts import download_artifacts
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from polyturn import layout
from polyturn.tracking.delivery import first_line, is_away, speaking
from polyturn.tracking.evaluations import RUN_TAG
from polyturn.tracking.lineage import lock_outs
from polyturn.tracking.model_store import DVC_TAG
from polyturn.tracking.record import ENVIRONMENT
from polyturn.tracking.store import Store, TrackingError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

PIN_TAG = "pinned"  # "true": `polyturn gc` leaves the run, and what it needs, alone
_KEPT_TAGS = {PIN_TAG: "pinned", "comparison.set": "a counted comparison"}
_UNCACHED = (layout.METRICS, layout.REGISTERED)  # outs that dvc.yaml keeps out of the cache
_WORK_TAG = "train.work"
_PARENT = "mlflow.parentRunId"
_PAGE = 500


@dataclass(frozen=True)
class RunRecord:
    """A run; `family` is the id of its pipeline run, or its own; `work` is where it trained, if it did."""

    run_id: str
    name: str
    family: str
    is_running: bool
    artifact_uri: str
    work: str | None


@dataclass(frozen=True)
class Needs:
    """Runs that are needed, each with the reason, runs that are not, and digests of DVC that the former need."""

    kept: Mapping[str, str]
    runs: Sequence[RunRecord]
    digests: frozenset[str]

    @property
    def spare(self) -> list[RunRecord]:
        """The runs that nobody needs, oldest first."""
        return [run for run in self.runs if run.run_id not in self.kept]

    @property
    def running(self) -> list[RunRecord]:
        """The runs in progress."""
        return [run for run in self.runs if run.is_running]


def find(store: Store, keep_last: int) -> Needs:
    """Look at all runs of the experiment and at all registered models.

    A run is needed with its whole family (pipeline run and stages): if it is running; pinned; among the `keep_last`
    last of its stage or of pipeline runs; the source or the evaluation of a version that has an alias, had the
    champion's, or is among the `keep_last` last of its model.

    Raises:
        TrackingError: the store does not answer.
    """
    with speaking(store):
        stored = list(_runs(store))
        versions = list(_kept_versions(store, keep_last))
        why = _reasons(stored, versions, keep_last)
        records = [_record(run) for run in stored]
        families: dict[str, str] = {}
        for record in records:
            if record.run_id in why:
                families.setdefault(record.family, why[record.run_id])
        kept = {r.run_id: families[r.family] for r in records if r.family in families}
        digests = {str(v.tags[DVC_TAG]) for v, _ in versions if DVC_TAG in v.tags}
        for run_id in kept:
            digests |= set(recorded_outs(store, run_id).values())
    return Needs(kept, records, frozenset(digests))


def pin(store: Store, run_id: str, *, is_pinned: bool) -> None:
    """Pin a run, or take the pin away.

    Raises:
        TrackingError: there is no such run.
    """
    with speaking(store):
        try:
            store.client.get_run(run_id)
        except MlflowException as error:
            if is_away(error):
                raise
            raise TrackingError(
                f"{store.addresses.uri!r} has no run {run_id!r} ({first_line(error)})"
            ) from None
        store.client.set_tag(run_id, PIN_TAG, str(is_pinned).lower())


def recorded_outs(store: Store, run_id: str) -> dict[str, str]:
    """Path -> md5 of the outs in the dvc.lock that a run keeps; {} if it keeps none."""
    for name in (str(layout.DVC_LOCK), f"{ENVIRONMENT}/{layout.DVC_LOCK}"):
        with TemporaryDirectory() as scratch:
            try:
                path = download_artifacts(
                    run_id=run_id,
                    artifact_path=name,
                    dst_path=scratch,
                    tracking_uri=store.addresses.uri,
                )
            except (MlflowException, OSError):
                continue
            try:
                outs = lock_outs(Path(path))
            except ValueError as error:
                logger.warning("run %s: %s", run_id, error)
                return {}
            return {path: md5 for path, md5 in outs.items() if Path(path) not in _UNCACHED}
    return {}


def _runs(store: Store) -> Iterator[MlflowRun]:
    yield from _pages(
        lambda token: store.client.search_runs(
            [store.experiment_id],
            max_results=_PAGE,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
    )


def _pages(
    search: Callable[[str | None], Any],
) -> Iterator[Any]:  # PagedList, which knows no type of its items
    token: str | None = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def _record(run: MlflowRun) -> RunRecord:
    run_id, tags = str(run.info.run_id), run.data.tags
    return RunRecord(
        run_id,
        str(run.info.run_name),
        str(tags.get(_PARENT, run_id)),
        run.info.status == "RUNNING",
        str(run.info.artifact_uri),
        tags.get(_WORK_TAG),
    )


def _reasons(
    runs: Sequence[MlflowRun], versions: Sequence[tuple[ModelVersion, str]], keep_last: int
) -> dict[str, str]:
    why: dict[str, str] = {}
    by_stage: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        run_id, tags = str(run.info.run_id), run.data.tags
        if _PARENT not in tags:
            by_stage[tags.get("stage", "pipeline")].append(run_id)
        if run.info.status == "RUNNING":
            why[run_id] = "running"
        for tag, reason in _KEPT_TAGS.items():
            if tags.get(tag, "false") != "false":
                why.setdefault(run_id, reason)
    for stage, run_ids in by_stage.items():
        for run_id in run_ids[len(run_ids) - min(keep_last, len(run_ids)) :]:
            why.setdefault(run_id, f"one of the last of {stage}")
    for version, reason in versions:
        for run_id in (version.run_id, version.tags.get(RUN_TAG), version.tags.get(_PARENT)):
            why[str(run_id)] = reason
    return why


def _kept_versions(store: Store, keep_last: int) -> Iterator[tuple[ModelVersion, str]]:
    client = store.client
    for model in _pages(
        lambda token: client.search_registered_models(max_results=_PAGE, page_token=token)
    ):
        aliases = client.get_registered_model(model.name).aliases
        by_number = {str(number): alias for alias, number in aliases.items()}
        found = client.search_model_versions(f"name = '{model.name}'")
        found = sorted(found, key=lambda version: int(version.version))
        last = {version.version for version in found[len(found) - min(keep_last, len(found)) :]}
        for version in found:
            name = f"{model.name} v{version.version}"
            if alias := by_number.get(str(version.version)):
                yield version, f"{name} is {alias}"
            elif "champion.reason" in version.tags:
                yield version, f"{name} was champion"
            elif version.version in last:
                yield version, f"{name} is one of the last versions"
