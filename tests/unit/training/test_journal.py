"""polyturn.training.journal: first timestamps survive kills, equal steps are one entry, different ones are told."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from polyturn.training.journal import Journal


def clock(start: int) -> Callable[[], int]:
    return itertools.count(start).__next__


def test_a_step_sampled_again_keeps_its_first_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, clock(100))
    entries = [
        first.enter(step, {"a": 0.1 + step, "n": float("nan")}, {"perf/x": 5.0}) for step in (0, 1)
    ]
    again = Journal(path, clock(900))
    assert again.enter(1, {"a": 1.1, "n": float("nan")}, {"perf/x": 7.0}).at_ms == 101
    assert dict(again.enter(0, {"a": 0.1, "n": float("nan")}, {}).times) == {"perf/x": 5.0}
    assert again.enter(2, {"a": 2.1}, {}).at_ms == 900
    assert [entry.at_ms for entry in entries] == [100, 101]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_a_kill_cut_short_is_as_if_never_written(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, clock(100))
    for step in (0, 1):
        journal.enter(step, {"a": 1.0}, {"perf/x": 1.0})
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, clock(900))
    assert [again.enter(step, {"a": 1.0}, {}).at_ms for step in (0, 1)] == [100, 900]
    assert [json.loads(line)["at_ms"] for line in path.read_text().splitlines()] == [100, 900]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe", b"{", b"[]", b'{"step": 0}', b"\x00" * 9, b"", b'{"a": 1}']
)
def test_a_damaged_line_is_passed_over_with_a_warning(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, clock(100))
    for step in (0, 1):
        journal.enter(step, {"a": 1.0}, {})
    path.write_bytes(damage + b"\n" + path.read_bytes().split(b"\n", 1)[1])
    with caplog.at_level(logging.WARNING):
        again = Journal(path, clock(900))
    assert "journal.jsonl line 1 is passed over" in caplog.text
    assert [again.enter(step, {"a": 1.0}, {}).at_ms for step in (0, 1)] == [900, 101]


def test_a_step_that_comes_out_differently_is_told_and_entered_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, clock(100)).enter(3, {"a": 1.0, "b": 2.0, "c": 3.0}, {})
    with caplog.at_level(logging.WARNING):
        entry = Journal(path, clock(900)).enter(3, {"a": 1.0, "b": 2.5, "d": 3.0}, {})
    assert entry.at_ms == 900
    assert "step 3 came out differently" in caplog.text
    assert "first in b, c, d;" in caplog.text
    assert Journal(path, clock(0)).enter(3, {"a": 1.0, "b": 2.5, "d": 3.0}, {}).at_ms == 900


def test_the_score_of_the_last_policy_is_no_step(tmp_path: Path) -> None:
    """A run of two steps that is given a third one: what was its end is now a step."""
    journal = Journal(tmp_path / "journal.jsonl", clock(100))
    journal.enter(2, {"eval/accuracy": 0.5}, {}, is_end=True)
    assert journal.enter(2, {"eval/accuracy": 0.5, "train/loss": 0.1}, {}).at_ms == 101


def test_without_a_file_it_is_kept_in_memory() -> None:
    journal = Journal(None, clock(100))
    assert journal.enter(0, {"a": 1.0}, {}).at_ms == 100
    assert journal.enter(0, {"a": 1.0}, {}).at_ms == 100
