"""A comparison as lines for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.evaluation.compare import Comparison, Row, Side
from polyturn.evaluation.statistics import Interval

Table = Sequence[Sequence[str]]  # the first row is the heading


def interval(found: Interval) -> str:
    """An accuracy: 0.750 [0.640, 0.830]."""
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def difference(found: Interval) -> str:
    """A paired difference with signs: +0.050 [-0.010, +0.110]."""
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def verdict(found: Comparison) -> str:
    """What the interval of the paired difference says, in one sentence."""
    gain = found.gain
    second, first = found.second.label, found.first.label
    if gain.low > 0:
        return f"{second} is better than {first}: the whole interval lies above 0."
    if gain.high < 0:
        return f"{second} is worse than {first}: the whole interval lies below 0."
    return f"No difference is shown between {second} and {first}: the interval holds 0."


def caution(found: Comparison) -> str:
    """How often this set was used, and the interval that allows for it."""
    if found.num_comparisons <= 1:
        return "This is the first comparison made on this evaluation set."
    return (
        f"{found.num_comparisons} pairs were compared on this evaluation set by now; an interval that holds for all of "
        f"them together (Bonferroni) is {difference(found.adjusted)}."
    )


def score_table(found: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """One row per score or kind."""
    heading = ["", "problems", found.first.label, found.second.label, "difference (paired, 95%)"]
    return [
        heading,
        *(
            [
                row.name,
                str(row.num_problems),
                interval(row.first.accuracy),
                interval(row.second.accuracy),
                difference(row.difference),
            ]
            for row in rows
        ),
    ]


def pass_table(found: Comparison) -> list[list[str]]:
    """pass@k of both under sampling; [] with one try per problem."""
    first, second = found.rows[0].first, found.rows[0].second
    ks = sorted(set(first.pass_at_k) & set(second.pass_at_k))
    if len(ks) < 2:
        return []
    sides: Sequence[tuple[str, Side]] = ((found.first.label, first), (found.second.label, second))
    return [
        ["", *(f"pass@{k}" for k in ks)],
        *([label, *(f"{side.pass_at_k[k]:.3f}" for k in ks)] for label, side in sides),
    ]


def changed_params(found: Comparison) -> list[list[str]]:
    """The params in which the two runs differ; [] where neither or both agree in all."""
    first, second = found.first.params, found.second.params
    keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    if not first or not second or not keys:
        return []
    heading = ["params.yaml", found.first.label, found.second.label]
    return [heading, *([key, first.get(key, "–"), second.get(key, "–")] for key in keys)]


def tables(found: Comparison) -> list[tuple[str, list[list[str]]]]:
    """All tables with their titles; those without rows are left out."""
    together = found.agreement
    agreement = [
        ["solved by both", f"only {found.first.label}", f"only {found.second.label}", "by neither"],
        [
            str(n)
            for n in (together.both, together.only_first, together.only_second, together.neither)
        ],
    ]
    shown = [
        ("", score_table(found, found.rows)),
        ("By kind of problem", score_table(found, found.kinds) if found.kinds else []),
        ("pass@k", pass_table(found)),
        ("Problems", agreement),
        ("What is different", changed_params(found)),
    ]
    return [(title, table) for title, table in shown if table]


def markdown(found: Comparison) -> str:
    """The whole comparison without its pictures."""
    parts = [f"## {found.second.label} against {found.first.label}", verdict(found), caution(found)]
    parts.append(f"Evaluation set `{found.first.evaluation[:12]}`.")
    for title, table in tables(found):
        parts += [f"### {title}"] if title else []
        parts.append(_markdown_table(table))
    return "\n\n".join(parts) + "\n"


def lines(found: Comparison) -> list[str]:
    """The whole comparison for a terminal."""
    shown = [verdict(found), caution(found)]
    for title, table in tables(found):
        shown += ["", *([title] if title else []), *_columns(table)]
    return shown


def _markdown_table(table: Table) -> str:
    rows = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in table]
    return "\n".join([rows[0], "|" + "---|" * len(table[0]), *rows[1:]])


def _columns(table: Table) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
