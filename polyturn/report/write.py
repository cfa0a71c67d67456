"""The report of a run: one self-contained HTML page, runs/report.html."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from polyturn import layout
from polyturn.data.files import atomic_path
from polyturn.pictures import Pictures
from polyturn.report.data import picture_directories, read_run
from polyturn.report.page import build_page
from polyturn.report.trajectories import TEMPLATES, TokenReader


def write_report(root: Path) -> Path:
    """Write the report of the run below `root` (a checkout) and return its path.

    Whatever is absent (no evaluation, not registered yet) is said to be so on the page.
    """
    run = read_run(root)
    page = build_page(run, TokenReader(root / layout.POLICY / "tokenizer.json"))
    pictures = Pictures(picture_directories(root))

    def source(sha256: str) -> Markup | None:
        uri = pictures.data_uri(sha256)
        return Markup('src="{}"').format(uri) if uri else None

    html = TEMPLATES.get_template("report.html.jinja").render(page=page, src=source)
    return write_page(root / layout.REPORT, html)


def write_page(path: Path, html: str) -> Path:
    """Write an HTML page atomically."""
    with atomic_path(path) as partial:
        partial.write_text(html, encoding="utf-8", errors="replace")  # halves of surrogate pairs
    return path
