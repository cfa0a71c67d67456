"""Environments for rollouts in tests; env.build names them as tests.unit.toy_envs:NAME."""

from __future__ import annotations

import time
from collections.abc import Mapping

from polyturn.envs.base import Observation
from polyturn.envs.zoom import REGIONS, cut, region_box
from polyturn.types import Problem


class Talker:
    """Answers "ok" until a reply holds "box" (a final answer); a reply that holds "bad" breaks it."""

    def __init__(self, close_s: float) -> None:
        self._close_s = close_s

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, object]]:
        if "bad" in response_text:
            raise RuntimeError("the environment broke")
        return Observation("ok"), "box" in response_text, {}

    def close(self) -> None:
        time.sleep(self._close_s)


def build_talker(problem: Problem, params: Mapping[str, object]) -> Talker:
    """Make a Talker; problems in params["broken"] cannot be built; closing takes params["close_s"]."""
    if problem.id in params.get("broken", ()):  # type: ignore[operator]
        raise RuntimeError(f"no environment for {problem.id}")
    return Talker(float(params.get("close_s", 0.0)))  # type: ignore[arg-type]


class Shower:
    """Shows a region of the picture after every reply; which one depends on the reply. Never done by itself."""

    def __init__(self, problem: Problem) -> None:
        self._picture = problem.images[0]

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, object]]:
        region = list(REGIONS)[sum(response_text.encode()) % 4]
        crop = cut(self._picture, region_box(region, 0.25))
        return Observation(region, (crop,)), False, {"region": region}


def build_shower(problem: Problem) -> Shower:
    """Make a Shower."""
    return Shower(problem)
