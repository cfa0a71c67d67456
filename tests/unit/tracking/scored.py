"""Registered versions with chosen results by problem, in a project's own store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from polyturn.data.files import write_jsonl
from polyturn.data.synthetic import draw_figure, figure_rng
from polyturn.envs.base import image_record
from polyturn.evaluation.results import RESULTS, SCORE, ProblemResult, to_row
from polyturn.evaluation.statistics import Interval
from polyturn.params import RegistryParams, SyntheticParams, TrackingParams
from polyturn.pictures import Pictures
from polyturn.tracking import evaluations, open_run
from polyturn.tracking.promotion import Rule
from polyturn.tracking.registry import Candidate, Registration, register
from polyturn.trajectories import save_pictures

NUM_PROBLEMS = 64
PARAMS = RegistryParams(name="tiny policy")


def policy(project: Path, weights: str) -> Path:
    """A directory of files that stands for a policy."""
    directory = project / f"policy-{weights}"
    (directory / "nested").mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "nested/model.safetensors").write_text(weights)
    return directory


def candidate(project: Path, weights: str, accuracy: float, evaluation: str = "set 1") -> Candidate:
    """A policy that is right at the first problems."""
    interval = Interval(accuracy, accuracy - 0.1, accuracy + 0.1)
    return Candidate(
        policy(project, weights),
        evaluation,
        interval,
        {1: accuracy, 4: 0.9},
        {"git.commit": "c0ffee"},
    )


def first_right(number: int) -> list[ProblemResult]:
    """Results that are right at the first `number` problems."""
    return [
        ProblemResult(f"test/{i}", "1", {SCORE: (i < number,), "policy/greedy": (i % 2 == 0,)})
        for i in range(NUM_PROBLEMS)
    ]


def drawn(tries: Sequence[Sequence[bool]], pictures: Path) -> list[ProblemResult]:
    """Results with the pictures, questions and kinds of drawn figures."""
    found: list[ProblemResult] = []
    for index, right in enumerate(tries):
        figure, picture = draw_figure(figure_rng(0, "test", index), SyntheticParams())
        record = image_record(picture)
        save_pictures(pictures, [record])
        said = figure.answer if right[0] else figure.answer + 1
        found.append(
            ProblemResult(
                id=f"test/{index:06d}",
                answer=str(figure.answer),
                correct={SCORE: tuple(right), "policy/greedy": (right[0],)},
                kind=f"{figure.shape} {figure.quantity}",
                question=f"Find the {figure.quantity}.",
                pictures=(record.sha256,),
                replies={SCORE: f"The label is read. Answer: \\boxed{{{said}}}"},
            )
        )
    return found


def submit(
    project: Path,
    entry: Candidate,
    params: RegistryParams = PARAMS,
    *,
    results: Sequence[ProblemResult] | None = None,
    tracking: TrackingParams | None = None,
) -> Registration:
    """Register in a run of its own; without `results` the first problems are right, as many as the accuracy says."""
    rows = first_right(round(NUM_PROBLEMS * entry.accuracy.mean)) if results is None else results
    write_jsonl(project / RESULTS, map(to_row, rows))
    where = tracking or TrackingParams()
    with open_run(where, root=project, name="register", stage="register") as run:
        run.log_params({"learner": {"lr": len(entry.directory.name)}, "seed": 0})
        evaluations.log(
            run,
            project / RESULTS,
            entry.evaluation,
            pictures=Pictures([project / "png"]),
            max_pictures=100,
        )
        rule = Rule(params.min_gain, bootstrap_samples=2000)
        return register(run, entry, params, rule=rule, root=project)


def write_params(project: Path, **sections: object) -> None:
    """A params.yaml that names the model of PARAMS."""
    tree = {"registry": {"name": PARAMS.name}, **sections}
    (project / "params.yaml").write_text(yaml.safe_dump(tree))
