"""The trajectory viewer: one file, every trajectory, pictures once, clear errors."""

import json
import re
from pathlib import Path

import pytest

from polyturn import layout, trajectories
from polyturn.cli import view
from polyturn.cli.view import ViewError
from tests.unit.fake_run import STEPS, make_run


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def pictures_of(page: str) -> dict[str, str]:
    found = re.search(r'id="pictures">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_run_directory_shows_every_sibling_with_its_pictures_once(
    run_directory: Path, tmp_path: Path
):
    page = view.view(run_directory, tmp_path / "out/view.html").read_text()
    entries = [
        e
        for step in (0, STEPS - 1)
        for e in trajectories.read_step(run_directory / layout.TRAJECTORIES, step)
    ]
    assert page.count("<article") == len(entries) == 32
    assert page.count("<section") == 8
    shown = set(re.findall(r'data-sha="(\w+)"', page))
    assert shown == {image["sha256"] for entry in entries for image in entry["images"]}
    assert pictures_of(page).keys() == shown
    assert all(uri.startswith("data:image/png") for uri in pictures_of(page).values())
    assert not re.search(r'(src|href)="?https?:', page)


@pytest.mark.parametrize(
    "source", [layout.TRAJECTORIES, layout.TRAJECTORIES / "step_000000.jsonl.gz"]
)
def test_a_directory_of_steps_and_one_file_are_understood(
    run_directory: Path, tmp_path: Path, source: Path
):
    page = view.view(run_directory / source, tmp_path / "view.html").read_text()
    assert page.count("<article") in (16, 32)
    assert "northwest" in page


def test_steps_can_be_named(run_directory: Path, tmp_path: Path):
    page = view.view(run_directory, tmp_path / "view.html", steps=[39]).read_text()
    assert page.count("<article") == 16
    assert "1 of 2 steps are on this page: 39." in page


def test_many_steps_are_thinned_out_and_the_page_says_so(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(view, "MAX_TRAJECTORIES", 16)
    page = view.view(run_directory, tmp_path / "view.html").read_text()
    assert "1 of 2 steps are on this page: 0." in page


def test_nothing_to_view_is_an_error_that_says_what_was_looked_for(tmp_path: Path):
    with pytest.raises(ViewError, match=r"neither step_\*\.jsonl\.gz nor artifacts/trajectories"):
        view.view(tmp_path, tmp_path / "view.html")


def test_an_unknown_step_is_named(run_directory: Path, tmp_path: Path):
    with pytest.raises(ViewError, match=r"has no steps \[7\]; it has 0 to 39"):
        view.view(run_directory, tmp_path / "view.html", steps=[0, 7])


def test_text_of_a_reply_cannot_become_markup(run_directory: Path, tmp_path: Path):
    entry = trajectories.read_step(run_directory / layout.TRAJECTORIES, 0)[0]
    entry["turns"][0]["text"] = "</script><script>alert(1)</script>"
    entry["token_ids"], entry["loss_mask"], entry["logprobs"] = [], [], []
    path = trajectories.write_records(tmp_path / "one.jsonl.gz", [entry])
    page = view.view(path, tmp_path / "view.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_halves_of_surrogate_pairs_are_shown_as_question_marks(run_directory: Path, tmp_path: Path):
    entry = trajectories.read_step(run_directory / layout.TRAJECTORIES, 0)[0]
    entry.update(reward=None, status="failed", stop_reason="env_error", error="bad \ud83d text")
    path = trajectories.write_records(tmp_path / "one.jsonl.gz", [entry])
    assert "bad ? text" in view.view(path, tmp_path / "view.html").read_text(encoding="utf-8")


def test_a_failed_trajectory_shows_its_error(run_directory: Path, tmp_path: Path):
    entry = trajectories.read_step(run_directory / layout.TRAJECTORIES, 0)[0]
    entry.update(reward=None, status="failed", stop_reason="env_error", error="ZeroDivisionError")
    path = trajectories.write_records(tmp_path / "one.jsonl.gz", [entry])
    page = view.view(path, tmp_path / "view.html").read_text()
    assert "ZeroDivisionError" in page
    assert 'data-verdict="failed"' in page
    assert "reward none" in page
