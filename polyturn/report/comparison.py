"""The page of a comparison: one self-contained HTML file with charts and the problems on which two policies differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from polyturn.evaluation import compare_text
from polyturn.evaluation.compare import Comparison, Pair, Scored
from polyturn.evaluation.results import SCORE, ProblemResult
from polyturn.pictures import Pictures
from polyturn.report.charts import Bar, Line, bar_chart, line_chart
from polyturn.report.differences import Difference, difference_chart
from polyturn.report.trajectories import TEMPLATES
from polyturn.report.write import write_page


@dataclass(frozen=True)
class Answer:
    """What one policy said to a problem; `tries` is "right", "wrong" or "3 of 8 right"."""

    label: str
    verdict: str  # correct | partial | wrong
    tries: str
    reply: str


@dataclass(frozen=True)
class Differing:
    """A problem that the two do not solve alike."""

    result: ProblemResult
    answers: tuple[Answer, Answer]


@dataclass(frozen=True)
class Page:
    """What compare.html.jinja shows, in its order."""

    first: Scored
    second: Scored
    headline: str
    interval: str
    verdict: str
    caution: str
    evaluation: str
    num_problems: int
    differences: Markup
    bars: Markup
    curves: Markup | None
    tables: Sequence[tuple[str, list[list[str]]]]
    facts: Sequence[tuple[str, str, str]]  # name, first's, second's
    gained: Sequence[Differing]  # right for the second alone
    lost: Sequence[Differing]
    num_gained: int
    num_lost: int


def write_comparison(path: Path, found: Comparison, pictures: Pictures, *, num_shown: int) -> Path:
    """Write the page with at most `num_shown` problems in each direction; returns `path`."""

    def source(sha256: str) -> Markup | None:
        uri = pictures.data_uri(sha256)
        return Markup('src="{}"').format(uri) if uri else None

    page = build_page(found, num_shown=num_shown)
    html = TEMPLATES.get_template("compare.html.jinja").render(page=page, src=source)
    return write_page(path, html)


def build_page(found: Comparison, *, num_shown: int) -> Page:
    """Put the page together."""
    gain = found.gain
    gained = [sides for sides in found.differing if sides[1].share() > sides[0].share()]
    lost = [sides for sides in found.differing if sides[1].share() < sides[0].share()]
    return Page(
        first=found.first,
        second=found.second,
        headline=f"{100 * gain.mean:+.1f}",
        interval=f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}",
        verdict=compare_text.verdict(found),
        caution=compare_text.caution(found),
        evaluation=found.first.evaluation[:12],
        num_problems=found.rows[0].num_problems,
        differences=_differences(found),
        bars=_bars(found),
        curves=_curves(found),
        tables=compare_text.tables(found),
        facts=_facts(found),
        gained=[_differing(sides, found) for sides in gained[:num_shown]],
        lost=[_differing(sides, found) for sides in lost[:num_shown]],
        num_gained=len(gained),
        num_lost=len(lost),
    )


def _differences(found: Comparison) -> Markup:
    rows = [Difference(row.name, row.difference) for row in found.rows]
    if found.num_comparisons > 1:
        label = f"{found.rows[0].name}, for {found.num_comparisons} comparisons"
        rows.insert(1, Difference(label, found.adjusted))
    rows += [Difference(row.name, row.difference) for row in found.kinds]
    return difference_chart(rows, width=1024, title="Paired differences in accuracy")


def _bars(found: Comparison) -> Markup:
    bars = [
        Bar(f"{label}, {row.name}", side.accuracy.mean, side.accuracy.low, side.accuracy.high, tone)
        for row in found.rows
        for label, side, tone in (
            (found.first.label, row.first, "c"),
            (found.second.label, row.second, "a"),
        )
    ]
    return bar_chart(bars, width=1024, title="Accuracy of both with 95% intervals")


def _curves(found: Comparison) -> Markup | None:
    lines = [
        Line(side.label, side.curve, tone)
        for side, tone in ((found.first, "b"), (found.second, "a"))
        if side.curve
    ]
    if not lines:
        return None
    return line_chart(lines, size=(1024, 300), unit=None, title="Reward while training")


def _facts(found: Comparison) -> list[tuple[str, str, str]]:
    first, second = found.first.facts, found.second.facts
    return [
        (key, first.get(key, "–"), second.get(key, "–")) for key in dict.fromkeys([*first, *second])
    ]


def _differing(sides: Pair, found: Comparison) -> Differing:
    first, second = sides
    return Differing(
        first, (_answer(first, found.first.label), _answer(second, found.second.label))
    )


def _answer(result: ProblemResult, label: str) -> Answer:
    tries = result.correct[SCORE]
    right = sum(tries)
    verdict = "correct" if right == len(tries) else "partial" if right else "wrong"
    said = f"{right} of {len(tries)} right" if len(tries) > 1 else "right" if right else "wrong"
    return Answer(label, verdict, said, result.replies.get(SCORE, ""))
