"""Draw the reward curves of several runs in one picture, such as docs/demo.svg of the runs of `make test-full`.

usage: python scripts/plot_curves.py PICTURE.svg NAME=DIRECTORY ...
       python scripts/plot_curves.py docs/demo.svg "seed 0=runs/seed-0" "seed 1=runs/seed-1"
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from polyturn import layout
from polyturn.report.charts import Line, line_chart

SIZE = (760, 300)
COLOURS = ("#3b63c9", "#c9603b", "#3b8f5a", "#8a55b5", "#807c28")
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #666 } .grid { stroke: #ddd } .end { text-anchor: end }
.mid { text-anchor: middle } path { fill: none; stroke-width: 2 } .hit, .dot, .hover { display: none }
"""


def read_curve(directory: Path) -> list[float | None]:
    """Mean reward per rollout batch."""
    with (directory / layout.CURVE.name).open() as file:
        return [float(row["reward_mean"]) for row in csv.DictReader(file) if row["reward_mean"]]


def main(picture: Path, runs: Sequence[str]) -> None:
    """Write the picture; the legend names each run."""
    pairs = [run.rpartition("=") for run in runs]
    lines = [
        Line(name, read_curve(Path(directory)), f"tone{index}")
        for index, (name, _, directory) in enumerate(pairs)
    ]
    chart = str(line_chart(lines, size=SIZE, unit=(0.0, 1.0), title="Reward of a rollout batch"))
    tones = "".join(f".tone{index} {{ stroke: {COLOURS[index]} }}\n" for index in range(len(lines)))
    legend = "".join(
        f'<text x="{SIZE[0] - 24}" y="{200 + 18 * index}" class="end" '
        f'style="fill:{COLOURS[index]}">{line.label}</text>'
        for index, line in enumerate(lines)
    )
    head, _, body = chart.partition(">")
    picture.write_text(
        f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}{tones}</style>'
        f'<rect width="{SIZE[0]}" height="{SIZE[1]}" fill="#fff"/>{body.removesuffix("</svg>")}{legend}</svg>\n'
    )
    print(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
