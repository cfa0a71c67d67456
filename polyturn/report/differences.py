"""A chart of paired differences: one row each, a dot with its interval beside the line of no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from polyturn.evaluation.statistics import Interval
from polyturn.report.charts import short, ticks

_CHARACTER = 7  # pixels across, of a row's label
_ROW, _TOP, _FOOT, _RIGHT = 38, 8, 26, 190


@dataclass(frozen=True)
class Difference:
    """One row; the interval is of second minus first."""

    label: str
    found: Interval


def difference_chart(rows: Sequence[Difference], *, width: int, title: str) -> Markup:
    """The rows under each other on one scale that holds 0 and every interval."""
    left = max(170, 20 + _CHARACTER * max((len(row.label) for row in rows), default=0))
    low, high = _range(rows)
    height = _TOP + _ROW * len(rows) + _FOOT

    def x(value: float) -> float:
        return left + (width - left - _RIGHT) * (value - low) / (high - low)

    parts: list[str] = []
    for tick in ticks(low, high, 6):
        kind = "zero" if tick == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{height - _FOOT}"/>'
            f'<text class="tick mid" x="{x(tick):.1f}" y="{height - 8}">{_signed(tick)}</text>'
        )
    for index, row in enumerate(rows):
        parts.append(_row(row, x(row.found.low), x(row.found.mean), x(row.found.high), index, left))
        y = _TOP + _ROW * index + _ROW / 2
        said = f"{row.found.mean:+.3f} [{row.found.low:+.3f}, {row.found.high:+.3f}]"
        parts.append(
            f'<text class="name end small" x="{width}" y="{y + 5:.1f}">{escape(said)}</text>'
        )
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _row(row: Difference, low: float, mean: float, high: float, index: int, left: int) -> str:
    y = _TOP + _ROW * index + _ROW / 2
    tone = "good" if row.found.low > 0 else "bad" if row.found.high < 0 else "even"
    return (
        f'<text class="name end" x="{left - 14}" y="{y + 5:.1f}">{escape(row.label)}</text>'
        f'<path class="stem {tone}" d="M{low:.1f} {y:.1f}H{high:.1f}M{low:.1f} {y - 5:.1f}v10M{high:.1f} {y - 5:.1f}v10"/>'
        f'<circle class="dot {tone}" cx="{mean:.1f}" cy="{y:.1f}" r="5.5"/>'
    )


def _range(rows: Sequence[Difference]) -> tuple[float, float]:
    low = min([-0.01, *(row.found.low for row in rows)])
    high = max([0.01, *(row.found.high for row in rows)])
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{short(abs(value))}"
