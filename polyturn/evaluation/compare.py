"""Two policies on the same problems: paired difference with interval, over all problems and by their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyturn.evaluation.results import SCORE, ProblemResult
from polyturn.evaluation.statistics import (
    Interval,
    bootstrap_interval,
    paired_difference,
    pass_at_k,
)
from polyturn.seeds import derive

Pair = tuple[
    ProblemResult, ProblemResult
]  # one problem's results, of the first and the second policy

_POLICY = "policy/"  # prefix of the scores of what was trained; the others are the warm start's


class OtherSetError(ValueError):
    """Two policies were scored on different problems, or differently; the message has the digests."""


@dataclass(frozen=True)
class Scored:
    """A policy with what became of every problem; `evaluation` is the digest of the problems and their scoring.

    `label` is what people call it: "polyturn-geo3k v3", "run 0a1b2c". The rest is shown beside it: `facts` (commit,
    alias, ...), the params of its run by dotted name, and its training reward by step. `key` is what tells policies
    apart when comparisons are counted.
    """

    label: str
    evaluation: str
    results: Sequence[ProblemResult]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    curve: Sequence[float | None] = ()
    key: str = ""


@dataclass(frozen=True)
class Side:
    """One policy's score."""

    accuracy: Interval
    pass_at_k: Mapping[int, float]


@dataclass(frozen=True)
class Row:
    """The two side by side on some problems; `difference` is second minus first, paired by problem."""

    name: str  # of the decoding (sampled, greedy, ...) or of the kind of problem
    num_problems: int
    first: Side
    second: Side
    difference: Interval


@dataclass(frozen=True)
class Agreement:
    """Problems by who solved them; several tries count as solved when at least half are right."""

    both: int
    only_first: int
    only_second: int
    neither: int


@dataclass(frozen=True)
class Comparison:
    """`rows`: every score that both have, that of the promotion rule first. `adjusted` is its difference with an interval
    that holds for all comparisons made on this set together (Bonferroni: level 1 - 0.05 / number)."""

    first: Scored
    second: Scored
    rows: Sequence[Row]
    kinds: Sequence[Row]
    agreement: Agreement
    differing: Sequence[Pair]  # largest difference first
    num_comparisons: int  # on this set, this one included
    adjusted: Interval

    @property
    def gain(self) -> Interval:
        """The paired difference that the promotion rule reads."""
        return self.rows[0].difference


def compare(
    first: Scored, second: Scored, *, num_comparisons: int, bootstrap_samples: int
) -> Comparison:
    """Compare by problem; the same two always give the same numbers, as the seed comes from the set's digest.

    Raises:
        OtherSetError: the two were not scored on the same set.
        ValueError: one lacks the score policy/sampled.
    """
    pairs = pair(first, second)
    seed = derive(0, "compare", first.evaluation)

    def row(name: str, score: str, chosen: Sequence[Pair]) -> Row:
        shares = [[side.share(score) for side in sides] for sides in zip(*chosen, strict=True)]
        sides = [
            _side([sides[i] for sides in chosen], score, bootstrap_samples, seed) for i in (0, 1)
        ]
        difference = paired_difference(shares[0], shares[1], bootstrap_samples, seed)
        return Row(name, len(chosen), sides[0], sides[1], difference)

    shares = [[side.share() for side in sides] for sides in zip(*pairs, strict=True)]
    level = 1 - 0.05 / max(1, num_comparisons)
    return Comparison(
        first,
        second,
        rows=[row(score.removeprefix(_POLICY), score, pairs) for score in _scores(pairs)],
        kinds=[row(kind, SCORE, chosen) for kind, chosen in _by_kind(pairs).items()],
        agreement=_agreement(pairs),
        differing=_differing(pairs),
        num_comparisons=num_comparisons,
        adjusted=paired_difference(shares[0], shares[1], bootstrap_samples, seed, level),
    )


def pair(first: Scored, second: Scored) -> list[Pair]:
    """The problems of both, side by side in the first one's order.

    Raises:
        OtherSetError: the evaluation digests differ, or the problems do in spite of them.
    """
    if first.evaluation != second.evaluation:
        raise OtherSetError(
            f"{first.label} was scored on evaluation set {first.evaluation[:12]}, {second.label} on "
            f"{second.evaluation[:12]}: other problems, or the same scored otherwise (evaluate, env, reward, rollout); "
            "run `dvc repro register` for one of them under the params of the other"
        )
    others = {result.id: result for result in second.results}
    if others.keys() != {result.id for result in first.results}:
        raise OtherSetError(
            f"{first.label} and {second.label} name the same evaluation set {first.evaluation[:12]} and have results "
            f"for {len(first.results)} and {len(second.results)} problems that are not the same; one is damaged"
        )
    return [(result, others[result.id]) for result in first.results]


def _scores(pairs: Sequence[Pair]) -> list[str]:
    """Scores of the policies that every problem has on both sides; SCORE leads, and its absence is an error later."""
    known = [name for name in pairs[0][0].correct if name.startswith(_POLICY) and name != SCORE]
    return [
        SCORE,
        *(name for name in known if all(name in side.correct for p in pairs for side in p)),
    ]


def _side(results: Sequence[ProblemResult], score: str, num_samples: int, seed: int) -> Side:
    interval = bootstrap_interval([r.share(score) for r in results], num_samples, seed)
    tries = min(len(result.correct[score]) for result in results)
    ks = [2**power for power in range(tries.bit_length()) if 2**power <= tries]
    scores = {
        k: float(
            np.mean([pass_at_k(len(r.correct[score]), sum(r.correct[score]), k) for r in results])
        )
        for k in ks
    }
    return Side(interval, scores)


def _by_kind(
    pairs: Sequence[Pair],
) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for sides in pairs:
        if sides[0].kind:
            found.setdefault(sides[0].kind, []).append(sides)
    return dict(sorted(found.items()))


def _agreement(pairs: Sequence[Pair]) -> Agreement:
    solved = [tuple(side.share() >= 0.5 for side in sides) for sides in pairs]
    return Agreement(
        both=solved.count((True, True)),
        only_first=solved.count((True, False)),
        only_second=solved.count((False, True)),
        neither=solved.count((False, False)),
    )


def _differing(
    pairs: Sequence[Pair],
) -> list[Pair]:
    def size(sides: Pair) -> float:
        return abs(sides[1].share() - sides[0].share())

    return sorted((sides for sides in pairs if size(sides) > 0), key=lambda p: (-size(p), p[0].id))
