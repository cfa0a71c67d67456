"""Progress lines: what is written can be read, few are written, and the last one always is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn import progress
from polyturn.progress import Progress, ProgressLine, parse_line


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.from_regex(r"[a-z=.0-9 ]*", fullmatch=True))
def test_a_written_line_is_read_back(done: int, total: int, text: str) -> None:
    line = ProgressLine(done, total, text.strip())
    assert parse_line(f"{line}\n") == line


@pytest.mark.parametrize(
    "text", ["", "step 3/4", "::progress", "::progress a/b", "x ::progress 1/2"]
)
def test_other_lines_are_not_about_progress(text: str) -> None:
    assert parse_line(text) is None


def test_first_and_last_step_are_shown_and_a_fast_loop_is_throttled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(1000, "train") as bar:
        for step in range(1000):
            bar.update(reward=step / 1000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "::progress 1/1000 train reward=0"
    assert lines[-1] == "::progress 1000/1000 train reward=0.999"
    assert len(lines) < 10


def test_lines_come_again_when_time_has_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.5, 11.1, 11.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    bar = Progress(100, "x")
    for _ in range(4):
        bar.update(5)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["5/100", "15/100"]


def test_an_unknown_total_is_shown_as_zero(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(0, "rows")
    bar.update()
    assert parse_line(capsys.readouterr().out) == ProgressLine(1, 0, "rows")
