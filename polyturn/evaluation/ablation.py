"""Whether a policy looks: its accuracy with the environment's pictures against its accuracy with blank ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from polyturn.blind import blank
from polyturn.envs.base import (
    Env,
    EnvContext,
    ToolSchema,
    build,
    first_message,
    load_object,
    observation_message,
    reset_of,
)
from polyturn.evaluation.evaluate import EvaluationPlan, evaluate, is_correct
from polyturn.evaluation.statistics import Interval, bootstrap_interval, paired_difference
from polyturn.render import Renderer
from polyturn.rollout import RolloutSettings
from polyturn.sampler.base import Sampler
from polyturn.types import Group, ImageRecord, Message, Problem

_BUILD, _PARAMS = "ablated_build", "ablated_params"


@dataclass(frozen=True)
class Ablation:
    """Accuracies over the same problems with the same seeds, and their paired difference (seen minus blank)."""

    num_problems: int
    seen: Interval
    blank: Interval
    difference: Interval


class BlankedEnv:
    """An environment whose answers to replies show white pictures of the same size; all else is as it was.

    Its methods are as synchronous as those of the inner environment, so that time limits hold as before.
    """

    def __init__(self, inner: Env) -> None:
        self._inner = inner
        self.tools = cast("Sequence[ToolSchema]", getattr(inner, "tools", ()) or ())

    def reset(self, seed: int) -> object:
        """The inner environment's first observation, which belongs to the prompt, unchanged."""
        reset = reset_of(self._inner, seed)
        return (
            _then(reset(), lambda answered: first_message(self._inner, answered)) if reset else None
        )

    def step(self, response_text: str) -> object:
        """The inner environment's answer, with white pictures."""
        return _then(self._inner.step(response_text), self._blanked)

    def close(self) -> object:
        """Close the inner environment."""
        close = cast("Callable[[], object] | None", getattr(self._inner, "close", None))
        return close() if close else None

    def _blanked(self, answered: object) -> object:
        observation, is_done, info = cast("tuple[object, object, object]", answered)
        if is_done:
            return observation, is_done, info
        return blanked(observation_message(self._inner, observation)), is_done, info


def build_blanked(
    problem: Problem, params: Mapping[str, object], max_turns: int, seed: int
) -> BlankedEnv:
    """Build the environment that `params` names, blanked; a build function for env.build."""
    inner = cast("Mapping[str, object]", params[_PARAMS])
    builder = load_object(str(params[_BUILD]), "env.build")
    return BlankedEnv(build(builder, EnvContext(problem, inner, max_turns, seed)))


def blanked(message: Message) -> Message:
    """The message with each picture replaced by a white one of its size."""
    content = tuple(blank(p) if isinstance(p, ImageRecord) else p for p in message.content)
    return replace(message, content=content)


async def ablate(
    problems: Sequence[Problem],
    sampler: Sampler,
    renderer: Renderer,
    settings: RolloutSettings,
    plan: EvaluationPlan,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Ablation:
    """Score a policy twice, with what its environment shows and with blanks, the same seeds in both."""
    blind = settings.env.model_copy(
        update={
            "build": f"{__name__}:{build_blanked.__name__}",
            "params": {_BUILD: settings.env.build, _PARAMS: settings.env.params},
        }
    )
    sides: list[list[float]] = []
    for used in (settings, replace(settings, env=blind)):
        groups = await evaluate(problems, sampler, renderer, used, plan, on_batch)
        sides.append([_share(group) for group in groups])
    seen, blanked_out = (
        bootstrap_interval(side, plan.bootstrap_samples, plan.seed) for side in sides
    )
    difference = paired_difference(sides[1], sides[0], plan.bootstrap_samples, plan.seed)
    return Ablation(len(problems), seen, blanked_out, difference)


def _share(group: Group) -> float:
    return sum(is_correct(t) for t in group.trajectories) / len(group.trajectories)


def _then(answer: object, finish: Callable[[object], object]) -> object:
    """`finish` of the answer, now or when it has come."""
    if not inspect.isawaitable(answer):
        return finish(answer)

    async def later() -> object:
        came = await cast("Awaitable[object]", answer)
        # Aside, as it may wait for a coroutine of this loop.
        return await asyncio.to_thread(finish, came)

    return later()
