"""Environments that fail on purpose; env.build names them as tests.unit.envs.flaky_envs:NAME."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping

from polyturn.envs.base import Observation
from polyturn.types import Problem

Step = tuple[Observation, bool, dict[str, object]]

CALLS: Counter[str] = Counter()  # "place:problem id" -> how often it was reached; a test clears it
CLOSED: list[str] = []  # problem ids, in order; a test clears it
_LOCK = threading.Lock()  # environments run in threads of their own


class Flaky:
    """Fails params["fails"] times at params["place"] ("build", "reset", "step" or "close") by params["how"]."""

    def __init__(self, problem: Problem, params: Mapping[str, object]) -> None:
        self._id = problem.id
        self._params = params
        self._fail_at("build")

    def reset(self) -> tuple[str, dict[str, object]]:
        self._fail_at("reset")
        return "", {}

    def step(self, response_text: str) -> Step:
        self._fail_at("step")
        return Observation("go on"), "done" in response_text, {}

    def close(self) -> None:
        CLOSED.append(self._id)
        self._fail_at("close")

    def _fail_at(self, place: str) -> None:
        if self._params.get("only", self._id) != self._id:
            return
        with _LOCK:
            CALLS[f"{place}:{self._id}"] += 1
            is_failing = CALLS[f"{place}:{self._id}"] <= int(str(self._params.get("fails", 0)))
        if place != self._params.get("place") or not is_failing:
            return
        if self._params.get("how") == "hang":
            time.sleep(3600)
        raise ConnectionError(f"{place} is down")


def build_flaky(problem: Problem, params: Mapping[str, object]) -> Flaky:
    """Make a Flaky."""
    return Flaky(problem, params)


class Rude:
    """Asynchronous, and it never gives control back, or ignores that it was cancelled."""

    def __init__(self, how: object) -> None:
        self._how = how

    async def step(self, response_text: str) -> Step:
        if self._how == "block":
            time.sleep(0.8)
        while self._how == "ignore":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        if self._how == "cancel":
            raise asyncio.CancelledError
        return Observation(), True, {}


def build_rude(params: Mapping[str, object]) -> Rude:
    """Make a Rude."""
    return Rude(params["how"])
