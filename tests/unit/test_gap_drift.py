"""The script that looks for a drift of the gap: its least squares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.gap_drift import trend


def test_a_line_has_its_slope_and_no_error():
    found = trend(range(100), [0.01 + 0.0002 * step for step in range(100)])
    assert found.slope == pytest.approx(0.02)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.drifts
    assert (found.first, found.last) == (pytest.approx(0.0124), pytest.approx(0.0274))


def test_noise_around_a_constant_does_not_drift():
    noise = np.random.default_rng(0).normal(0.01, 0.001, 100)
    found = trend(range(100), noise.tolist())
    assert not found.drifts
    assert found.mean == pytest.approx(0.01, abs=5e-4)


def test_two_steps_say_nothing():
    assert trend([0, 1], [0.1, 0.2]).error == math.inf
