"""Viewer and report in a headless Chromium: scripts run, filters filter, pictures and tints are painted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyturn import layout, trajectories
from polyturn.cli import view
from polyturn.report.write import write_report
from tests.unit.browser import dom, needs_browser, screenshot
from tests.unit.fake_run import STEPS, make_run

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run_directory: Path) -> Path:
    return view.view(run_directory, run_directory / "view.html")


def entries_of(root: Path) -> list[trajectories.TrajectoryEntry]:
    steps = (trajectories.read_step(root / layout.TRAJECTORIES, step) for step in (0, STEPS - 1))
    return [entry for step in steps for entry in step]


def shown_cards(markup: str) -> list[str]:
    """The opening tags of the trajectories that are not hidden."""
    cards = re.findall(r"<article[^>]*>", markup)
    return [card for card in cards if ' hidden=""' not in card]


def test_filters_show_exactly_what_they_name(
    page: Path, run_directory: Path, tmp_path: Path
) -> None:
    markup = dom(page, f"step={STEPS - 1}&least=1&status=completed", tmp_path)
    wanted = [e for e in entries_of(run_directory) if e["step"] == STEPS - 1 and e["reward"] == 1]
    cards = shown_cards(markup)
    assert len(cards) == len(wanted) > 0
    assert all(f'data-step="{STEPS - 1}"' in card and 'data-reward="1.0"' in card for card in cards)
    assert f'<span id="count">{len(wanted)}</span>' in markup
    # A group without a fitting sibling is gone as a whole.
    hidden = len(re.findall(r'<section[^>]* hidden=""', markup))
    assert hidden >= 4


def test_a_reward_range_holds_both_bounds_and_leaves_out_those_without_reward(
    run_directory: Path, tmp_path: Path
) -> None:
    entry = trajectories.read_step(run_directory / layout.TRAJECTORIES, 0)[0]
    rewards = (0.0, 0.5, 1.0, None)
    entries = [{**entry, "sibling": i, "reward": reward} for i, reward in enumerate(rewards)]
    path = trajectories.write_records(tmp_path / "four.jsonl.gz", entries)  # type: ignore[arg-type]
    four = view.view(path, tmp_path / "four.html")
    counts = {
        fragment: len(shown_cards(dom(four, fragment, tmp_path)))
        for fragment in ("", "most=0.5", "least=0.5&most=0.5")
    }
    assert counts == {"": 4, "most=0.5": 2, "least=0.5&most=0.5": 1}


def test_every_picture_is_loaded_without_a_server(page: Path, tmp_path: Path) -> None:
    markup = dom(page, "", tmp_path)
    images = re.findall(r"<img[^>]*>", markup)
    assert len(images) > 32
    assert all('src="data:image/png;base64,' in image for image in images)


def share(picture: Image.Image, colour: tuple[int, int, int], tolerance: int = 12) -> float:
    """The share of pixels near a colour."""
    pixels = np.asarray(picture, dtype=np.int16)
    return float((np.abs(pixels - np.array(colour)).max(axis=2) <= tolerance).mean())


def test_the_screenshot_shows_cards_side_by_side_with_pictures_and_tints(
    page: Path, tmp_path: Path
) -> None:
    pictures = {
        tint: screenshot(page, f"step=39&tint={tint}", tmp_path)
        for tint in ("logprob", "mask", "none")
    }
    plain = np.asarray(pictures["none"], dtype=np.int16)
    assert len(pictures["none"].getcolors(1 << 24) or []) > 50
    changed = {
        tint: float((np.abs(np.asarray(picture, dtype=np.int16) - plain).max(axis=2) > 8).mean())
        for tint, picture in pictures.items()
    }
    # Trained tokens are all tinted in one, only the unlikely ones in the other.
    assert changed["mask"] > changed["logprob"] > 0.0005
    # Three siblings stand in one row: their frames' left borders are in the same line of pixels.
    row = np.asarray(pictures["none"].convert("L"), dtype=np.int16)[300]
    edges = np.flatnonzero(np.abs(np.diff(row)) > 8)
    assert len(edges) >= 6


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 480])
def test_the_report_fits_its_window_in_both_colours(
    run_directory: Path, tmp_path: Path, dark: bool, width: int
) -> None:
    report = write_report(run_directory)
    picture = screenshot(report, "", tmp_path, size=(width, 1600), dark=dark)
    assert picture.width == width
    corner = picture.getpixel((2, 2))
    assert isinstance(corner, tuple)
    assert (sum(corner) < 200) == dark
    assert len(picture.getcolors(1 << 24) or []) > 50
