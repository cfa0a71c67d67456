"""`polyturn card`: the run card of this checkout, with what MLflow knows of its training run."""

from __future__ import annotations

from pathlib import Path

from polyturn import layout, params
from polyturn.pipeline.checkout import WORKTREES
from polyturn.report.card import HTML, MARKDOWN, TrainingRun, write_card
from polyturn.report.data import read_run
from polyturn.report.work import METRICS
from polyturn.tracking import histories
from polyturn.tracking.store import Store, connect


def run(root: Path) -> tuple[Path, Path]:
    """Write runs/card.html and runs/card.md of a checkout or worktree; a runs/NAME holds those of its run already.

    Raises:
        ValueError: params.yaml is wrong, nothing ran there, or the store does not answer.
    """
    kept = (root / HTML.name, root / MARKDOWN.name)
    if all(path.is_file() for path in kept):
        return kept
    chosen = params.load(root / layout.PARAMS)
    if not any((root / path).exists() for path in (layout.TRAIN_RUN, layout.METRICS)):
        raise ValueError(
            f"card: {root} has neither {layout.TRAIN_RUN} nor {layout.METRICS}, so nothing ran here; `dvc repro` first, or "
            f"name the directory of a run: one below {WORKTREES}, or runs/NAME"
        )
    return write(root, connect(chosen.tracking, root))


def write(root: Path, store: Store) -> tuple[Path, Path]:
    """The same with a store that is open already."""
    found = read_run(root)
    run_id = str(found.train_run.get("run_id", ""))
    known = histories.tags(store, run_id) if run_id else {}
    history = histories.read(store, run_id, METRICS) if known else {}
    return write_card(root, found, TrainingRun(run_id, known, history))
