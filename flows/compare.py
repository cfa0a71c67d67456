"""The flow `compare`: two versions or runs on the same evaluation set; a table, the report and the page on the run."""

from __future__ import annotations

from urllib.parse import urlsplit

from prefect import flow, get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.runtime import flow_run

from flows.artifacts import browsable
from flows.place import ROOT
from polyturn.cli import compare as compare_cli
from polyturn.evaluation import compare_text
from polyturn.evaluation.compare import Comparison


@flow(name="compare", validate_parameters=True)
def compare(
    first: str = "champion", second: str = "challenger", problems: int = 24
) -> dict[str, float]:
    """Compare `second` with `first`; return the paired difference in accuracy and its 95% interval.

    Args:
        first: v3, an alias, MODEL@ALIAS, MODEL/3 or an MLflow run id.
        second: as `first`.
        problems: how many of those on which they differ are shown in each direction.

    Raises:
        OtherSetError: they were scored on different sets.
        TrackingError: one is not there, or MLflow does not answer.
    """
    name = str(flow_run.get_name())
    request = compare_cli.Request(first, second, ROOT / "runs" / name / "compare.html", problems)
    outcome = compare_cli.run(request, ROOT)
    found = outcome.found
    verdict = f"{compare_text.verdict(found)} {compare_text.caution(found)}"
    create_table_artifact(table_of(found), key="comparison", description=verdict)
    create_markdown_artifact(compare_text.markdown(found), key="comparison-report")
    if urlsplit(outcome.url).scheme in ("http", "https"):
        create_link_artifact(
            browsable(outcome.url), link_text="page, pictures included", key="comparison-page"
        )
    get_run_logger().info("%s\n%s", verdict, outcome.page)
    gain = found.gain
    return {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}


def table_of(found: Comparison) -> list[dict[str, str]]:
    """Scores, then kinds, a row each."""
    heading, *rows = compare_text.score_table(found, [*found.rows, *found.kinds])
    names = ["score or kind", *heading[1:]]
    return [dict(zip(names, row, strict=True)) for row in rows]
