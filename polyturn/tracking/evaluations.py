"""Per-problem results as artifacts of the run that registered them, with the problems' pictures."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.exceptions import MlflowException

from polyturn import directories, layout
from polyturn.evaluation import results
from polyturn.evaluation.results import ProblemResult
from polyturn.pictures import Pictures
from polyturn.tracking.run import Run
from polyturn.tracking.store import Store, TrackingError, first_line

logger = logging.getLogger(__name__)

SET_TAG = "evaluation.digest"  # of a run or a version: what it was scored on
RUN_TAG = "evaluation.run_id"  # of a version: the run that holds its results
TRAINED_BY_TAG = "train.run_id"  # of a run that holds results: the training run of what was scored

_FOLDER = "evaluation"
_PICTURES = "pictures.zip"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal pictures make equal archives


def log(run: Run, file: Path, evaluation: str, *, pictures: Pictures, max_pictures: int) -> None:
    """Keep results.jsonl with `run`, and the pictures of its first problems in one archive.

    Raises:
        TrackingError: the store does not take them.
        ValueError: `file` is damaged.
    """
    run.log_artifact(file, _FOLDER)
    wanted = list(dict.fromkeys(sha for result in results.read(file) for sha in result.pictures))
    if len(wanted) > max_pictures:
        logger.warning(
            "the pictures of %d of %d test problems are kept for comparisons; registry.evaluation_pictures says so",
            max_pictures,
            len(wanted),
        )
    with TemporaryDirectory() as directory:
        path = Path(directory) / _PICTURES
        _pack(path, wanted[:max_pictures], pictures)
        run.log_artifact(path, _FOLDER)
    run.set_tags({SET_TAG: evaluation})


def fetch(store: Store, run_id: str, root: Path) -> Path:
    """A directory with the results.jsonl and the pictures (png/) that `log` kept; downloaded once.

    Raises:
        TrackingError: the run keeps none, or the store does not answer.
    """
    target = root / layout.STATE / "cache" / "evaluations" / run_id
    if (target / results.RESULTS).exists():
        return target
    with TemporaryDirectory(dir=_made(target.parent)) as directory:
        try:
            got = Path(store.client.download_artifacts(run_id, _FOLDER, directory))
        except (MlflowException, OSError) as error:
            raise TrackingError(
                f"run {run_id} keeps no results by problem at {store.addresses.uri!r} "
                f"({first_line(error)[:200]}); run `dvc repro register` for it again"
            ) from None
        if (got / _PICTURES).exists():
            with zipfile.ZipFile(got / _PICTURES) as archive:
                archive.extractall(got / "png")
        if not (got / results.RESULTS).exists():
            raise TrackingError(f"run {run_id} keeps no {_FOLDER}/{results.RESULTS}")
        directories.replace(got, target)
    return target


def read(store: Store, run_id: str, root: Path) -> Sequence[ProblemResult]:
    """The results by problem that `log` kept with a run.

    Raises:
        TrackingError: see `fetch`.
        ValueError: the file is damaged.
    """
    return results.read(fetch(store, run_id, root) / results.RESULTS)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _pack(path: Path, wanted: Sequence[str], pictures: Pictures) -> None:
    num_missing = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for sha256 in wanted:
            found = pictures.find(sha256)
            if found is None:
                num_missing += 1
                continue
            archive.writestr(zipfile.ZipInfo(f"{sha256}.png", _EPOCH), found.read_bytes())
    if num_missing:
        logger.warning("%d pictures of test problems are not in this checkout", num_missing)
