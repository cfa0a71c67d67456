"""The sealed part of the test split: scored for the last word only, and every opening is a run that is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from polyturn import layout, params
from polyturn.cli import evaluate as evaluate_cli
from polyturn.data.files import write_jsonl
from polyturn.evaluation import evaluation_set, results
from polyturn.evaluation.compare import Scored
from polyturn.evaluation.evaluate import evaluate, evaluation_settings, problem_results
from polyturn.evaluation.results import SCORE, ProblemResult
from polyturn.evaluation.statistics import Interval, bootstrap_interval
from polyturn.params import Params
from polyturn.pictures import Pictures
from polyturn.report.data import picture_directories
from polyturn.tracking import evaluations, openings, versions
from polyturn.tracking.run import open_run
from polyturn.tracking.store import Store, connect
from polyturn.tracking.versions import Entry

logger = logging.getLogger(__name__)


def lines(name: str) -> list[str]:
    """Score a registered version on the sealed problems of this checkout, and say how often they were opened.

    Raises:
        ValueError: there is no sealed part, or no such version.
    """
    root = Path.cwd()
    loaded = params.load(root / layout.PARAMS)
    store = connect(loaded.tracking, root)
    entry = versions.find(store, name, loaded.registry.name)
    found = score(entry, loaded, store, root)
    shares = [result.share() for result in found.results]
    interval = bootstrap_interval(shares, loaded.evaluate.bootstrap_samples, seed=0)
    return [
        f"{entry.label} on {len(shares)} sealed problems: {_said(interval)}",
        f"the sealed part {found.evaluation[:12]} was opened {openings.count(store, found.evaluation)} times",
    ]


def score(entry: Entry, loaded: Params, store: Store, root: Path) -> Scored:
    """The version's results on the sealed part: those of its last opening, or else of one made now.

    Raises:
        ValueError: there is no sealed part.
    """
    problems_file = root / layout.PROBLEMS / "problems.jsonl"
    problems = evaluate_cli.read_problems("test", loaded, "sealed")
    evaluation = evaluation_set.digest(problems_file, loaded, "sealed")
    run_id = openings.find(store, evaluation, entry.label)
    if run_id is None:
        logger.warning(
            "opening the sealed part of the test split (%d problems) for %s",
            len(problems),
            entry.label,
        )
        renderer, sampler = evaluate_cli.open_policy(
            evaluate_cli.find_policy(f"{entry.model}/{entry.version}", loaded), loaded
        )
        plan = evaluate_cli.plan_of(loaded, is_greedy=False)
        settings = evaluation_settings(loaded)
        with evaluate_cli.shown_progress(len(problems)) as progress:
            scoring = evaluate(problems, sampler, renderer, settings, plan, progress.update)
            groups = asyncio.run(scoring)
        found = problem_results(problems, {SCORE: groups}, loaded.evaluate.kind_columns)
        run_id = _keep(entry, found, evaluation, loaded, root)
    return Scored(
        f"{entry.label} (sealed)",
        evaluation,
        evaluations.read(store, run_id, root),
        entry.facts,
        key=run_id,
    )


def _keep(
    entry: Entry, found: Sequence[ProblemResult], evaluation: str, loaded: Params, root: Path
) -> str:
    name = f"sealed {entry.label}"
    with (
        open_run(loaded.tracking, root=root, name=name, stage="sealed") as opened,
        TemporaryDirectory() as directory,
    ):
        file = Path(directory) / results.RESULTS
        write_jsonl(file, map(results.to_row, found))
        evaluations.log(
            opened,
            file,
            evaluation,
            pictures=Pictures(picture_directories(root)),
            max_pictures=loaded.registry.evaluation_pictures,
        )
        openings.record(opened, evaluation, entry.label)
    return opened.run_id


def _said(found: Interval) -> str:
    return f"accuracy {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
