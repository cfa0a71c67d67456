"""Gradings per second, latency and agreement on real answers, beside math-verify alone in the same run.

python benchmarks/grading.py [--shared DIR] [--num-pairs N] [--quick]

The pairs: every real answer string with itself in a box (true), with another spelling of its value where the data has
one (true) and with the next answer of the file (true only when the values are equal). "Agreement" is the fraction of
pairs that a grader decides as the values say.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from polyturn.grading import numbers, reals
from polyturn.reward import answers_match

TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())
NUM_THREADS = 8


@dataclass(frozen=True)
class Pair:
    """A reply, a label, and whether their values are equal."""

    prediction: str
    reference: str
    expected: bool


@dataclass(frozen=True)
class Timing:
    """What one grader did on all pairs."""

    name: str
    per_second: float
    p50_ms: float
    p99_ms: float
    agreement: float


def value(answer: str) -> reals.Real | None:
    """The value of an answer string; None when it is no number."""
    try:
        return numbers.read(answer).real
    except numbers.NotANumberError:
        return None


def load_pairs(shared: Path, limit: int) -> list[Pair]:
    """The first `limit` pairs of the real answers."""
    with (shared / "data/answers.tsv").open(newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        answers = list(dict.fromkeys(row["answer"] for row in rows))
    problems = [
        json.loads(line) for line in (shared / "data/geo3k/problems.jsonl").read_text().splitlines()
    ]
    pairs = [Pair(f"Answer: \\boxed{{{answer}}}", answer, True) for answer in answers]
    pairs += [
        Pair(f"Answer: \\boxed{{{row['answer_exact']}}}", row["answer"], True)
        for row in problems
        if row["answer_exact"] != row["answer"]
        and row["rounding"] is None
        and "decimal" not in row["answer_kind"]
    ]
    for one, two in pairwise(answers):
        left, right = value(one), value(two)
        is_equal = left is not None and right is not None and reals.equal(left, right)
        pairs.append(Pair(f"Answer: \\boxed{{{one}}}", two, is_equal))
    step = max(1, len(pairs) // limit)
    return pairs[::step][:limit]


def by_polyturn(pair: Pair) -> bool:
    """Grade with strict rounding, as math-verify has no other."""
    return answers_match(pair.prediction, pair.reference, rounding="strict")


def by_math_verify(pair: Pair) -> bool:
    """Grade with math-verify alone; its own time limits raise in threads and are off."""
    reference = parse(f"${pair.reference}$", TARGETS, parsing_timeout=0)
    prediction = parse(pair.prediction, TARGETS, parsing_timeout=0)
    return bool(verify(reference, prediction, timeout_seconds=0))


def measure(
    name: str, grade: Callable[[Pair], bool], pairs: Sequence[Pair], num_threads: int
) -> Timing:
    """Grade all pairs once, from one thread or many."""
    numbers.read.cache_clear()
    latencies: list[float] = []

    def timed(pair: Pair) -> bool:
        start = time.perf_counter()
        is_right = grade(pair) == pair.expected
        latencies.append(time.perf_counter() - start)
        return is_right

    start = time.perf_counter()
    if num_threads == 1:
        right = [timed(pair) for pair in pairs]
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            right = list(threads.map(timed, pairs))
    wall = time.perf_counter() - start
    latencies.sort()
    at = lambda share: 1000 * latencies[int(share * (len(latencies) - 1))]  # noqa: E731
    return Timing(name, len(pairs) / wall, at(0.5), at(0.99), sum(right) / len(right))


def main() -> None:
    """Measure and print one table and one RESULT line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=Path(__file__).resolve().parents[2] / "shared"
    )
    parser.add_argument("--num-pairs", type=int, default=1500)
    parser.add_argument("--quick", action="store_true", help="150 pairs")
    options = parser.parse_args()
    if options.quick:
        options.num_pairs = 150
    logging.disable(logging.WARNING)
    pairs = load_pairs(options.shared, options.num_pairs)
    by_math_verify(pairs[0])  # its first call builds its grammars
    answers_match("x+1", "1+x")  # the first symbolic comparison starts the children
    timings = [
        measure("polyturn", by_polyturn, pairs, 1),
        measure(f"polyturn, {NUM_THREADS} threads", by_polyturn, pairs, NUM_THREADS),
        measure("math-verify", by_math_verify, pairs, 1),
        measure(f"math-verify, {NUM_THREADS} threads", by_math_verify, pairs, NUM_THREADS),
    ]
    print(
        f"{len(pairs)} pairs\n{'grader':<24}{'gradings/s':>12}{'p50 ms':>10}{'p99 ms':>10}{'agreement':>11}"
    )
    for t in timings:
        print(
            f"{t.name:<24}{t.per_second:>12.0f}{t.p50_ms:>10.3f}{t.p99_ms:>10.3f}{t.agreement:>11.4f}"
        )
    result = {
        "ratio_vs_math_verify": round(timings[0].per_second / timings[2].per_second, 1),
        "ratio_vs_math_verify_threads": round(timings[1].per_second / timings[3].per_second, 1),
        "p99_ms": round(timings[0].p99_ms, 3),
        "agreement": round(timings[0].agreement, 4),
        "agreement_math_verify": round(timings[2].agreement, 4),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
