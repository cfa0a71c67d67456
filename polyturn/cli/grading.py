"""`polyturn grade`: grade one prediction, or a file of cases, and say why."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyturn.reward import Verdict, grade

EXIT_MATCH, EXIT_NO_MATCH, EXIT_USAGE = 0, 1, 2

_BOX_PROFILES = ("boxed", "think+boxed")  # cases whose answers count in boxes only


@dataclass(frozen=True)
class Case:
    """One line of a case file; `expected` is None where the line does not say it."""

    id: str
    prediction: str
    reference: str
    expected: bool | None
    needs_box: bool
    group: str


def main(argv: Sequence[str]) -> int:
    """Grade PREDICTION against REFERENCE, or every line of --file.

    Returns:
        0: a match, or a file that was read to its end; 1: no match; 2: wrong usage or an unreadable file.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.file is None) == (options.reference is None):
        parser.error("give PREDICTION and REFERENCE, or --file")
    if not 0 <= options.tolerance < math.inf:
        parser.error(f"--tolerance must be 0 or more, got {options.tolerance:g}")
    if not 0 < options.timeout_s < math.inf:
        parser.error(f"--timeout-s must be more than 0, got {options.timeout_s:g}")
    if options.file is None:
        verdict = _grade(
            Case("", options.prediction, options.reference, None, options.needs_box, ""), options
        )
        _write(_describe(verdict))
        return EXIT_MATCH if verdict.match else EXIT_NO_MATCH
    try:
        cases = list(read_cases(options.file))
    except OSError as error:
        sys.stderr.write(f"polyturn grade: --file {options.file}: {error.strerror or error}\n")
        return EXIT_USAGE
    except ValueError as error:
        sys.stderr.write(f"polyturn grade: {error}\n")
        return EXIT_USAGE
    _grade_file(cases, options)
    return EXIT_MATCH


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyturn grade", description=__doc__)
    parser.add_argument("prediction", nargs="?", help="a reply of the model, or a bare answer")
    parser.add_argument("reference", nargs="?", help="the right answer")
    parser.add_argument(
        "--file", type=Path, help="JSON lines with prediction, reference and, if known, expected"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative to the reference")
    parser.add_argument("--rounding", choices=("reference", "strict"), default="reference")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of one symbolic comparison")
    parser.add_argument(
        "--needs-box", action="store_true", help="an answer outside of a box counts as none"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="with --file: show every line, not only disagreements",
    )
    return parser


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a JSON lines file; a null prediction or reference is an empty one.

    Raises:
        ValueError: a line is no object with prediction and reference; the message names the line.
    """
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}") from None
        if not isinstance(row, dict) or not {"prediction", "reference"} <= row.keys():
            raise ValueError(f"{path}:{number} must be an object with prediction and reference")
        yield _case(cast("Mapping[str, object]", row), number)


def _case(row: Mapping[str, object], number: int) -> Case:
    expected = row.get("expected")
    labels = (
        str(row.get("kind", "case")),
        str(row.get("scope", "")),
        "conflict" if row.get("conflict") else "",
    )
    return Case(
        id=str(row.get("id", number)),
        prediction=str(row["prediction"] if row["prediction"] is not None else ""),
        reference=str(row["reference"] if row["reference"] is not None else ""),
        expected=expected if isinstance(expected, bool) else None,
        needs_box=bool(row.get("needs_box", row.get("profile") in _BOX_PROFILES)),
        group=" ".join(label for label in labels if label),
    )


def _grade(case: Case, options: argparse.Namespace) -> Verdict:
    return grade(
        case.prediction,
        case.reference,
        tolerance=options.tolerance,
        rounding=options.rounding,
        timeout_s=options.timeout_s,
        needs_box=case.needs_box or options.needs_box,
    )


def _grade_file(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Show each disagreement with what a line expects, then the agreement by kind, scope and conflict."""
    total: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    for case in cases:
        verdict = _grade(case, options)
        is_agreed = case.expected is None or verdict.match == case.expected
        total[case.group] += 1
        agreed[case.group] += is_agreed
        if options.verbose or not is_agreed or case.expected is None:
            mark = "" if case.expected is None else ("agrees: " if is_agreed else "DISAGREES: ")
            _write(f"{case.id}\t{mark}{_describe(verdict)}\treference {case.reference[:80]!r}")
    width = max((len(group) for group in total), default=0)
    for group in sorted(total):
        _write(f"{group:<{width}}  {agreed[group]}/{total[group]} agree")
    _write(f"{'all':<{width}}  {sum(agreed.values())}/{sum(total.values())} agree")


def _describe(verdict: Verdict) -> str:
    word = "match" if verdict.match else "no match"
    notes = [] if verdict.answer is None else [f"answer {verdict.answer[:80]!r}"]
    if verdict.is_malformed:
        notes.append(f"a {'later ' if notes else ''}box is never closed")
    return f"{word}: {verdict.reason}" + (f" ({', '.join(notes)})" if notes else "")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
