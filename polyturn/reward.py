"""What a finished trajectory is worth: weighted terms, of which `correctness` grades the last reply.

Grading itself is in polyturn/grading; its public names are these. Terms are `(trajectory, problem) -> float`, or
with a keyword `params` for the reward section; text terms read assistant text only, env terms read Turn.info.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

from polyturn.envs.base import load_object
from polyturn.grading import grade as grading
from polyturn.grading.compare import Policy, Rounding
from polyturn.grading.extract import boxes_in, extract
from polyturn.grading.grade import Verdict, parse_reference
from polyturn.overlong import soft_overlong_punishment
from polyturn.types import Problem, Trajectory

if TYPE_CHECKING:
    from polyturn.params import RewardParams

__all__ = [
    "GraderError",
    "Reward",
    "RewardFailureError",
    "Verdict",
    "answers_match",
    "boxed",
    "check_failures",
    "correctness",
    "extract_answer",
    "grade",
    "is_gradable",
    "parse_reference",
    "score",
    "soft_overlong_punishment",
]

logger = logging.getLogger(__name__)


class GraderError(RuntimeError):
    """The grader itself failed on an answer (time limit, crashed child); the answer counts as wrong."""


class RewardFailureError(ValueError):
    """More trajectories of a step could not be graded than reward.max_failure_fraction allows."""


def extract_answer(text: str) -> str | None:
    """The answer of an assistant reply as it is written; None when there is none (see docs/grading.md)."""
    return extract(text).answer


def grade(
    prediction: str,
    reference: str,
    *,
    tolerance: float = 0.0,
    rounding: Rounding = "reference",
    timeout_s: float = 2.0,
    needs_box: bool = False,
) -> Verdict:
    """Whether a reply, or a bare answer, says the reference, and why.

    `tolerance` is relative to the reference; with rounding "reference" a value that rounds to a decimal reference
    counts; `timeout_s` limits symbolic work; `needs_box` reads only boxed answers.
    """
    policy = Policy(tolerance, rounding, timeout_s)
    return grading.grade(prediction, reference, policy, needs_box=needs_box)


def answers_match(
    prediction: str, reference: str, *, tolerance: float = 0.0, rounding: Rounding = "reference"
) -> bool:
    """Whether a prediction counts as the reference; see `grade`."""
    return grade(prediction, reference, tolerance=tolerance, rounding=rounding).match


def is_gradable(answer: str) -> bool:
    """Whether a bare answer could be a reference: a value, an expression or a choice letter."""
    try:
        parse_reference(answer)
    except ValueError:
        return False
    return True


def correctness(trajectory: Trajectory, problem: Problem, *, params: RewardParams) -> float:
    """1 when the last reply's answer is the problem's, else 0; earlier replies and observations are not read.

    An environment whose tools submit answers says so by `final_answer` (text) in the info of its last step.

    Raises:
        GraderError: the grader failed.
    """
    if not trajectory.turns:
        return 0.0
    last = trajectory.turns[-1]
    submitted = last.info.get("final_answer")
    verdict = grade(
        f"\\boxed{{{submitted}}}" if isinstance(submitted, str) else last.reply_text,
        problem.answer,
        tolerance=params.tolerance,
        rounding=params.rounding,
        timeout_s=params.timeout_s,
        needs_box=params.needs_box,
    )
    if verdict.failure:
        raise GraderError(
            f"{verdict.failure} on answer {str(verdict.answer)[:80]!r} of problem {problem.id}"
        )
    return float(verdict.match)


def boxed(trajectory: Trajectory, problem: Problem) -> float:
    """Reward term: 1.0 if the last reply holds a complete box, right or wrong (a format reward, arXiv:2501.12948)."""
    del problem
    return float(bool(trajectory.turns and boxes_in(trajectory.turns[-1].reply_text)[0]))


@dataclass(frozen=True)
class Reward:
    """The weighted sum, each term's own value by name, and what went wrong in terms that failed (they count 0)."""

    total: float
    terms: Mapping[str, float]
    failures: tuple[str, ...] = ()


def score(trajectory: Trajectory, problem: Problem, params: RewardParams) -> Reward:
    """Evaluate all terms of reward.terms on a finished trajectory; a failing term is data, not a crash.

    Raises:
        ValueError: a term cannot be imported or has arguments of other names.
    """
    values: dict[str, float] = {}
    failures: list[str] = []
    total = 0.0
    for index, item in enumerate(params.terms):
        term = _load(item.term, f"reward.terms[{index}].term")
        name = term.name if term.name not in values else item.term
        try:
            values[name] = _finite(term.evaluate(trajectory, problem, params))
        except Exception as error:  # a user's term may raise anything; it is counted
            logger.warning("reward term %s failed: %s", item.term, error)
            failures.append(f"{name}: {type(error).__name__}: {error}")
            values[name] = 0.0
        total += item.weight * values[name]
    return Reward(total, values, tuple(failures))


def check_failures(
    failures: Sequence[Sequence[str]], params: RewardParams, *, out_of: int | None = None
) -> None:
    """Refuse rewards of which too many have a failed term; `failures` are each reward's, `out_of` how many there will be.

    Raises:
        RewardFailureError: it is above reward.max_failure_fraction; the message holds the first cause.
    """
    causes = [own[0] for own in failures if own]
    count = out_of or len(failures)
    if causes and len(causes) / count > params.max_failure_fraction:
        raise RewardFailureError(
            f"reward.max_failure_fraction is {params.max_failure_fraction}, but {len(causes)} of {count} "
            f"trajectories could not be graded; the first cause: {causes[0]}"
        )


@dataclass(frozen=True)
class _Term:
    name: str
    function: Callable[..., object]
    takes_params: bool

    def evaluate(self, trajectory: Trajectory, problem: Problem, params: RewardParams) -> object:
        if self.takes_params:
            return self.function(trajectory, problem, params=params)
        return self.function(trajectory, problem)


@cache
def _load(path: str, key: str) -> _Term:
    function = load_object(path, key)
    parameters = inspect.signature(function).parameters
    unknown = [
        p.name
        for p in list(parameters.values())[2:]
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name != "params"
    ]
    if unknown:
        raise ValueError(
            f"{key}: {path} has arguments {unknown}; a term takes (trajectory, problem) and params"
        )
    return _Term(path.partition(":")[2], function, "params" in parameters)


def _finite(value: object) -> float:
    number = float(cast("float", value))
    if not math.isfinite(number):
        raise ValueError(f"the term returned {number}")
    return number
