"""`polyturn evaluate`: score a policy of this checkout on held-out problems, with its pictures or without."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from polyturn import data, layout, params
from polyturn.determinism import choose_kernels
from polyturn.evaluation import evaluation_set
from polyturn.evaluation.ablation import Ablation, ablate
from polyturn.evaluation.evaluate import EvaluationPlan, evaluate, evaluation_settings, summarize
from polyturn.evaluation.statistics import Interval
from polyturn.params import Params
from polyturn.policy import model
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.runtime import set_up_torch, training_device
from polyturn.sampler.hf import HfSampler
from polyturn.seeds import derive
from polyturn.types import Problem


@dataclass(frozen=True)
class Request:
    """What to score and how."""

    policy: str  # a directory, or what the registry calls a version (champion, v3)
    split: str
    num_problems: int | None  # the first ones only; None: all
    is_greedy: bool
    is_ablated: bool


def run(request: Request) -> list[str]:
    """Score, and say what was found; problems, seeds and settings are those of the evaluate stage.

    Raises:
        ValueError: there is no such policy, or no problem of the split.
    """
    loaded = params.load(layout.PARAMS)
    problems = read_problems(request.split, loaded)[: _checked(request.num_problems)]
    renderer, sampler = open_policy(find_policy(request.policy, loaded), loaded)
    settings, plan = evaluation_settings(loaded), plan_of(loaded, is_greedy=request.is_greedy)
    rounds = 2 if request.is_ablated else 1
    with shown_progress(rounds * len(problems)) as progress:
        scoring = (problems, sampler, renderer, settings, plan, progress.update)
        if request.is_ablated:
            return ablation_lines(asyncio.run(ablate(*scoring)))
        summary = summarize(asyncio.run(evaluate(*scoring)), plan)
    found = Interval(*(summary[f"accuracy{part}"] for part in ("", "_low", "_high")))
    return [_line(f"accuracy on {len(problems)} problems", found)]


def find_policy(name: str, loaded: Params) -> Path:
    """The directory of a policy; that of a registered version is fetched into .polyturn/cache/models.

    Raises:
        ValueError: there is none.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if Path(name).exists():
        raise ValueError(f"--policy {name} holds no config.json; run `dvc repro train`")
    # The registry is not needed, and MLflow not imported, for a directory.
    from polyturn.tracking import fetch_model, versions
    from polyturn.tracking.store import connect

    try:
        version = versions.find_version(
            connect(loaded.tracking, Path.cwd()), name, loaded.registry.name
        )
    except ValueError as error:
        raise ValueError(f"--policy {name} is no directory, and of the registry: {error}") from None
    target = layout.STATE / "cache" / "models" / f"{version.name}-{version.version}"
    if not target.exists():
        address = f"models:/{version.name}/{version.version}"
        fetch_model.fetch_model(address, target, loaded, Path.cwd())
    return target


def open_policy(directory: Path, loaded: Params) -> tuple[Renderer, HfSampler]:
    """The policy on learner.device, ready to sample."""
    set_up_torch(loaded)
    choose_kernels(loaded)
    policy = model.load(loaded.model, directory)
    torch.nn.Module.to(policy.model, training_device(loaded.learner))
    renderer = Renderer(policy)
    return renderer, HfSampler(policy, renderer, is_vision_frozen=True)


def shown_progress(total: int) -> Progress:
    """A bar on a terminal; elsewhere what is said is the result alone (`::progress` lines are for flows)."""
    return Progress(total, "evaluate", is_shown=sys.stdout.isatty())


def read_problems(split: str, loaded: Params, part: evaluation_set.Part = "open") -> list[Problem]:
    """The checkout's problems of a split; of test those of one part.

    Raises:
        ValueError: there is none.
    """
    path = layout.PROBLEMS / "problems.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is not there; run `dvc repro model` (or `make demo`)")
    problems = data.read_problems(path, layout.IMAGES)
    if split == "test":
        return evaluation_set.choose(problems, loaded, part)
    found = [problem for problem in problems if problem.split == split]
    if not found:
        raise ValueError(f"--split {split}: {path} has no such problem")
    return found


def ablation_lines(found: Ablation) -> list[str]:
    """What is said of an ablation.

    >>> half = Interval(0.5, 0.4, 0.6)
    >>> print(*ablation_lines(Ablation(64, half, Interval(0.25, 0.2, 0.3), half)), sep="\\n")
    accuracy on 64 problems          0.500 [0.400, 0.600]
    with blank pictures              0.250 [0.200, 0.300]
    difference (paired, 95%)        +0.500 [+0.400, +0.600]
    """
    gain = found.difference
    return [
        _line(f"accuracy on {found.num_problems} problems", found.seen),
        _line("with blank pictures", found.blank),
        f"{'difference (paired, 95%)':<31} {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]",
    ]


def _line(name: str, found: Interval) -> str:
    return f"{name:<32} {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _checked(count: int | None) -> int | None:
    if count is not None and count < 1:
        raise ValueError(f"--num must be at least 1, got {count}")
    return count


def plan_of(loaded: Params, *, is_greedy: bool) -> EvaluationPlan:
    """How the evaluate stage scores, or one greedy try."""
    scoring = loaded.evaluate
    plan = EvaluationPlan(
        seed=derive(loaded.seed, "test"),
        samples_per_problem=scoring.samples_per_problem,
        temperature=scoring.temperature,
        batch_size=scoring.batch_size,
        bootstrap_samples=scoring.bootstrap_samples,
    )
    return replace(plan, samples_per_problem=1, temperature=0.0) if is_greedy else plan
