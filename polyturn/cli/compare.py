"""`polyturn compare FIRST SECOND`: find both, compare, write the page, and count the comparison."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout, params
from polyturn.evaluation import compare_text
from polyturn.evaluation.compare import Comparison, compare, pair
from polyturn.pictures import Pictures
from polyturn.report.comparison import write_comparison
from polyturn.report.data import picture_directories
from polyturn.tracking import comparisons, evaluations, versions
from polyturn.tracking.run import open_run
from polyturn.tracking.store import Store, connect
from polyturn.tracking.versions import VersionError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to compare, and where the page goes; `num_shown` problems at most in each direction."""

    first: str
    second: str
    page: Path
    num_shown: int


@dataclass(frozen=True)
class Outcome:
    """The comparison, its page, and the address of the MLflow run that stands for it."""

    found: Comparison
    page: Path
    url: str


def run(request: Request, root: Path) -> Outcome:
    """Compare two versions, aliases or runs as the checkout `root` finds them.

    Raises:
        OtherSetError: they were scored on different sets.
        TrackingError: one is not there, both are the same, or the store does not answer.
    """
    loaded = params.load(root / layout.PARAMS)
    store = connect(loaded.tracking, root)
    entries = [
        versions.find(store, name, loaded.registry.name) for name in (request.first, request.second)
    ]
    first, second = (versions.load(store, entry, root) for entry in entries)
    if first.key == second.key:
        raise VersionError(
            f"{request.first!r} and {request.second!r} are one policy ({first.label}, whose results run "
            f"{first.key} keeps): there is nothing to compare"
        )
    pair(first, second)
    name = f"compare {first.label} with {second.label}"
    with open_run(loaded.tracking, root=root, name=name, stage="compare") as opened:
        comparisons.record(opened, first, second)
        made = comparisons.count(store, first.evaluation)
        found = compare(
            first,
            second,
            num_comparisons=made.pairs,
            bootstrap_samples=loaded.evaluate.bootstrap_samples,
        )
        pictures = Pictures([*_kept(store, entries, root), *picture_directories(root)])
        page = write_comparison(request.page, found, pictures, num_shown=request.num_shown)
        opened.log_artifact(page)
        opened.log_text(compare_text.markdown(found), "compare.md")
        gain = found.gain
        opened.log_metrics({"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high})
    return Outcome(found, page, opened.url)


def _kept(store: Store, entries: list[versions.Entry], root: Path) -> list[Path]:
    """Directories of the pictures that were kept with the results."""
    return [evaluations.fetch(store, entry.results_run_id, root) / "png" for entry in entries]
