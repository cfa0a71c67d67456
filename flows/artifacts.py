"""What a flow run shows on its page in Prefect: the plan, the stages, the reward curve, links."""

from __future__ import annotations

import base64
import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
)

from flows import summary
from polyturn.pipeline.plan import Plan
from polyturn.report.charts import Line, line_chart
from tasks.stage import StageReport

PAGE_VARIABLE = "POLYTURN_TRACKING_PAGE"  # MLflow's address for a browser, where it is another than for programs

_TITLE = "Mean reward of a rollout batch"
_SIZE = (720, 300)
_STYLE = """
svg { background: #ffffff; font-family: Inter, 'Helvetica Neue', Arial, sans-serif; }
.grid { stroke: #ece9e3; stroke-width: 1; } .tick { fill: #6f6b64; font-size: 12px; }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.line { fill: none; stroke: #2456c7; stroke-width: 2; stroke-linejoin: round; } .dot, .stem { fill: #2456c7; stroke: #2456c7; }
.hover { opacity: 0; } .title { fill: #1d1c1a; font-size: 14px; font-weight: 600; }
"""


def show_plan(plan: Plan) -> None:
    """Which stages would run, and why; the first thing on the page."""
    create_markdown_artifact(summary.plan_table(plan), key="plan", description="What runs, and why")


def show_stages(reports: Sequence[StageReport], rows: Sequence[summary.Row]) -> None:
    """What became of the stages, and what the run came to."""
    results = "\n".join(f"| {row.what} | {row.value} |" for row in rows)
    create_markdown_artifact(
        f"{summary.stage_table(reports)}\n\n| result | |\n|---|---|\n{results}",
        key="stages",
        description="What became of each stage",
    )


def show_curve(path: Path) -> None:
    """The reward of each rollout batch as a picture, from the train stage's CSV.

    In Markdown, since Prefect's image artifact writes out its address, which here is the picture itself.
    """
    rewards = _rewards(path)
    if rewards:
        create_markdown_artifact(
            f"![{_TITLE}]({picture(rewards)})", key="reward-curve", description="Reward by step"
        )


def show_mlflow(url: str) -> None:
    """A link to the run in MLflow while it goes on; a SQLite store has no page."""
    if urlsplit(url).scheme in ("http", "https"):
        create_link_artifact(
            browsable(url),
            link_text="MLflow run",
            key="mlflow-run",
            description="The run in MLflow, live",
        )
    else:
        store, _, place = url.partition("/#/")
        create_markdown_artifact(
            f"`mlflow ui --backend-store-uri {store}`, then `http://127.0.0.1:5000/#/{place}`",
            key="mlflow-run",
            description="MLflow run",
        )


def browsable(url: str) -> str:
    """The address of an MLflow page for a browser: POLYTURN_TRACKING_PAGE in place of the server's own address."""
    page = os.environ.get(PAGE_VARIABLE)
    return f"{page.rstrip('/')}/#/{url.partition('/#/')[2]}" if page else url


def picture(rewards: Sequence[float | None]) -> str:
    """A data: address of the curve, an SVG that stands by itself."""
    chart = line_chart([Line("reward", rewards)], size=_SIZE, unit=None, title=_TITLE)
    width, height = _SIZE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 30}" '
        f'viewBox="0 -30 {width} {height + 30}"><style>{_STYLE}</style>'
        f'<rect x="0" y="-30" width="{width}" height="{height + 30}" fill="#ffffff"/>'
        f'<text class="title" x="14" y="-8">{_TITLE}</text>'
    )
    inner = str(chart).partition(">")[2]
    return f"data:image/svg+xml;base64,{base64.b64encode((head + inner).encode()).decode()}"


def _rewards(path: Path) -> list[float | None]:
    """The reward of each step; the row behind the last one, a score of the policy alone, has none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        found = [float(row["reward_mean"] or "nan") for row in csv.DictReader(file)]
    while found and math.isnan(found[-1]):
        found.pop()
    return [*found]
