"""A run beside its reproduction: what counts as the same, and where two curves part."""

from __future__ import annotations

import doctest

import pytest

from polyturn.pipeline import reproduction
from polyturn.pipeline.reproduction import (
    FirstDifference,
    digest_rows,
    environment_changes,
    first_difference,
    metric_rows,
)

WAS = {"loss": {0: 1.0, 1: 0.5, 2: 0.25}, "perf/time": {0: 3.0}, "eval/accuracy": {2: 0.5}}


def test_examples_hold():
    assert doctest.testmod(reproduction).failed == 0


def test_equal_curves_do_not_part_whatever_time_they_took():
    assert first_difference(WAS, {**WAS, "perf/time": {0: 9.0}, "system/cpu": {0: 1.0}}) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({**WAS, "loss": {0: 1.0, 1: 0.5, 2: 0.25000000000000006}}, (2, "loss", 0.25)),
        ({**WAS, "loss": {0: 1.0, 1: 0.4, 2: 0.1}}, (1, "loss", 0.5)),
        ({**WAS, "loss": {0: 1.0, 1: 0.5}}, (2, "loss", 0.25)),
        ({**WAS, "new": {0: 1.0}}, (0, "new", None)),
        ({"loss": WAS["loss"]}, (2, "eval/accuracy", 0.5)),
    ],
)
def test_the_first_step_that_differs_is_found_to_the_last_bit(
    now: dict[str, dict[int, float]], expected: tuple[int, str, float | None]
):
    found = first_difference(WAS, now)
    assert isinstance(found, FirstDifference)
    assert (found.step, found.metric, found.was) == expected


def test_digests_are_compared_by_stage_and_what_holds_a_run_id_is_left_out():
    was = {"train": {"artifacts/policy": "a", "artifacts/train_run.json": "1"}}
    now = {
        "fetch": {"raw": "x"},
        "train": {"artifacts/policy": "b", "artifacts/train_run.json": "2"},
    }
    rows = {row.what: row for row in digest_rows(was, now)}
    assert set(rows) == {"raw", "artifacts/policy"}
    assert not rows["artifacts/policy"].is_same
    assert not rows["raw"].is_same  # what was not recorded is not called the same
    assert digest_rows(was, was)[0].is_same


def test_numbers_are_compared_by_name_and_to_the_last_bit():
    was = {"test": {"n": 2, "policy": {"accuracy": 0.1}}}
    now = {"test": {"n": 2, "policy": {"accuracy": 0.1}, "more": 1}}
    rows = {row.what: row.is_same for row in metric_rows(was, now)}
    assert rows == {"test.n": True, "test.policy.accuracy": True, "test.more": False}
    assert not metric_rows({"a": 0.1}, {"a": 0.10000000000000002})[0].is_same


def test_the_environment_says_what_differs_and_nothing_else():
    was = {
        "python": "3.11.7",
        "cpu_model": "A",
        "packages": {"torch": "2.13", "numpy": "2.4"},
        "gpus": [],
    }
    now = {
        "python": "3.11.7",
        "cpu_model": "B",
        "packages": {"torch": "2.14", "pip": "26"},
        "gpus": (),
    }
    changes = [(c.what, c.was, c.now) for c in environment_changes(was, now)]
    assert changes == [
        ("cpu_model", "A", "B"),
        ("numpy", "2.4", "absent"),
        ("pip", "absent", "26"),
        ("torch", "2.13", "2.14"),
    ]
    assert environment_changes(was, was) == []
