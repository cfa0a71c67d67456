"""Charts as small inline SVG: crisp at any size, coloured by the page's CSS, readable without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Numbers = Sequence[float | None]

_TICK_STEPS = (1, 2, 5, 10)


_CHARACTER = 7  # pixels across, of a bar's label


@dataclass(frozen=True)
class Line:
    """A curve over steps; None leaves a gap. `low` and `high` draw a band; `tone` is a CSS colour class."""

    label: str
    values: Numbers
    tone: str = "a"
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Bar:
    """One value with its interval."""

    label: str
    value: float
    low: float
    high: float
    tone: str


@dataclass(frozen=True)
class Frame:
    """Size and margins of a chart, in SVG units (CSS pixels at full width), and what its axes span."""

    width: int
    height: int
    num_steps: int
    y_low: float
    y_high: float
    left: int = 44
    right: int = 14
    top: int = 12
    bottom: int = 30

    def x(self, step: float) -> float:
        """Position of a step."""
        span = max(1, self.num_steps - 1)
        return self.left + (self.width - self.left - self.right) * step / span

    def y(self, value: float) -> float:
        """Position of a value."""
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`.

    >>> ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(s * magnitude for s in _TICK_STEPS if s * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis or a tile: few digits, no trailing zeros.

    >>> [short(v) for v in (0.0, 0.25, 1.5, 12.0, 0.00031, 1234.5)]
    ['0', '0.25', '1.5', '12', '3.1e-04', '1234']
    """
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def line_chart(
    lines: Sequence[Line], *, size: tuple[int, int], unit: tuple[float, float] | None, title: str
) -> Markup:
    """Curves over training steps; `unit` fixes the y range, else it is that of the values and 0.

    A line that has values at half of the steps or fewer is drawn as dots with whiskers.
    """
    num_steps = max((len(line.values) for line in lines), default=0)
    low, high = unit or _range(lines)
    frame = Frame(*size, num_steps, low, high)
    parts = [_grid(frame, small=size[1] < 200)]
    parts += [_band(frame, line) for line in lines if line.low and not _is_sparse(line)]
    parts += [
        _whiskers(frame, line) if _is_sparse(line) else _path(frame, line.values, line.tone)
        for line in lines
    ]
    parts.append(_hover(frame, lines))
    return _svg(size, title, parts)


def bar_chart(bars: Sequence[Bar], *, width: int, title: str) -> Markup:
    """Horizontal bars from 0 to 1 with whiskers for the intervals."""
    row, right, top = 46, 64, 8
    left = max(190, 20 + _CHARACTER * max((len(bar.label) for bar in bars), default=0))
    height = top + row * len(bars) + 26
    span = width - left - right
    parts: list[str] = []
    for tick in ticks(0, 1, 5):
        x = left + span * tick
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 26}"/>'
        )
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{height - 8}">{tick:.0%}</text>')
    for index, bar in enumerate(bars):
        y = top + row * index + 10
        middle = y + 13
        low, high, end = (left + span * value for value in (bar.low, bar.high, bar.value))
        parts.append(
            f"<g><title>{escape(bar.label)}: {bar.value:.1%} ({bar.low:.1%} to {bar.high:.1%})</title>"
            f'<text class="name end" x="{left - 14}" y="{middle + 5}">{escape(bar.label)}</text>'
            f'<rect class="fill {bar.tone}" x="{left}" y="{y}" width="{max(1.0, end - left):.1f}" '
            f'height="26" rx="3"/>'
            f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 6}v12'
            f'M{high:.1f} {middle - 6}v12"/>'
            f'<text class="value" x="{high + 10:.1f}" y="{middle + 5}">{bar.value:.1%}</text></g>'
        )
    return _svg((width, height), title, parts)


def _svg(size: tuple[int, int], title: str, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _known(values: Numbers) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _range(lines: Sequence[Line]) -> tuple[float, float]:
    values = [
        v for line in lines for row in (line.values, line.low, line.high) for v in _known(row)
    ]
    low, high = min([0.0, *values]), max([0.0, *values])
    return (low, high * 1.06 or 1.0) if low == 0 else (low * 1.06, high * 1.06)


def _is_sparse(line: Line) -> bool:
    """Whether only some steps have a value: these are then shown as dots."""
    return 0 < 2 * len(_known(line.values)) <= len(line.values)


def _grid(frame: Frame, *, small: bool) -> str:
    parts: list[str] = []
    for tick in ticks(frame.y_low, frame.y_high, 4 if small else 5):
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick end" x="{frame.left - 8}" y="{y + 4:.1f}">{short(tick)}</text>'
        )
    base = frame.height - frame.bottom
    for tick in ticks(0, max(1, frame.num_steps - 1), 4 if small else 8):
        if tick == int(tick):
            parts.append(
                f'<text class="tick mid" x="{frame.x(tick):.1f}" y="{base + 20}">{int(tick)}</text>'
            )
    return "".join(parts)


def _path(frame: Frame, values: Numbers, tone: str) -> str:
    commands: list[str] = []
    pen = "M"
    for step, value in enumerate(values):
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{frame.x(step):.1f} {frame.y(value):.1f}")
        pen = "L"
    return f'<path class="line {tone}" d="{"".join(commands)}"/>'


def _band(frame: Frame, line: Line) -> str:
    rows = [
        (step, low, high)
        for step, (low, high) in enumerate(zip(line.low, line.high, strict=True))
        if low is not None and high is not None
    ]
    upper = [f"{frame.x(step):.1f} {frame.y(high):.1f}" for step, _, high in rows]
    lower = [f"{frame.x(step):.1f} {frame.y(low):.1f}" for step, low, _ in reversed(rows)]
    return f'<path class="band {line.tone}" d="M{"L".join(upper + lower)}Z"/>' if rows else ""


def _whiskers(frame: Frame, line: Line) -> str:
    parts: list[str] = []
    for step, value in enumerate(line.values):
        if value is None:
            continue
        x, y = frame.x(step), frame.y(value)
        low = line.low[step] if line.low else None
        high = line.high[step] if line.high else None
        if low is not None and high is not None:
            parts.append(
                f'<path class="stem {line.tone}" d="M{x:.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"/>'
            )
        parts.append(f'<circle class="dot {line.tone}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
    return "".join(parts)


def _hover(frame: Frame, lines: Sequence[Line]) -> str:
    """A column per step whose tooltip says all values of the step."""
    half = (frame.x(1) - frame.x(0)) / 2 if frame.num_steps > 1 else 20.0
    parts: list[str] = []
    for step in range(frame.num_steps):
        said = [f"step {step}"]
        for line in lines:
            value = line.values[step] if step < len(line.values) else None
            if value is not None:
                said.append(f"{line.label} {short(value)}{_interval(line, step)}")
        parts.append(
            f'<rect class="hover" x="{frame.x(step) - half:.1f}" y="{frame.top}" '
            f'width="{2 * half:.1f}" height="{frame.height - frame.top - frame.bottom}">'
            f"<title>{escape(chr(10).join(said))}</title></rect>"
        )
    return "".join(parts)


def _interval(line: Line, step: int) -> str:
    low = line.low[step] if line.low else None
    high = line.high[step] if line.high else None
    return f" ({short(low)} to {short(high)})" if low is not None and high is not None else ""
