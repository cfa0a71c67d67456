"""What all tests share: a quiet offline environment, and throw-away projects whose stages do what a test needs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from polyturn import environment
from tests.toy_project import ToyProject

ROOT = Path(__file__).resolve().parent.parent

environment.apply()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., ToyProject]:
    """Make a git repository in which each named stage runs the given body (see ToyProject.create)."""

    def make(**bodies: str) -> ToyProject:
        return ToyProject.create(tmp_path / "toy", source=ROOT, bodies=bodies)

    return make


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes the slow files come first, the slowest at their head: the others fill up the time beside them."""
    if hasattr(config, "workerinput"):
        items.sort(key=_minutes, reverse=True)


def _minutes(item: pytest.Item) -> float:
    """How long the file takes, as its mark says; 0 where it is not slow."""
    mark = item.get_closest_marker("slow")
    return float(mark.kwargs.get("minutes", 0.5)) if mark else 0.0


def pytest_collection_finish() -> None:
    """Modules stay: nobody need look for garbage among them."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Captured text may hold half a surrogate pair (environments may), which pytest-xdist cannot send."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "replace").decode()) for name, text in report.sections
    ]
    return report
