"""Be the policy by hand: an environment's answers on the screen, replies from the keyboard, the reward at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from polyturn.envs.base import (
    Env,
    EnvContext,
    ToolSchema,
    build,
    first_message,
    load_object,
    observation_message,
    plain_info,
    reset_of,
)
from polyturn.envs.call import Caller, discard
from polyturn.params import EnvParams, Params, RewardParams, RewardTermParams, RolloutParams
from polyturn.reward import Reward, score
from polyturn.seeds import derive
from polyturn.types import ImageRecord, Json, Message, Problem, StopReason, Trajectory, Turn

# Reward of an environment that has no answer to grade.
_TERMS: Mapping[str, str] = {"polyturn.envs.sokoban:build_env": "polyturn.envs.sokoban:solved"}


class Screen(Protocol):
    """Where a game is shown and replies come from."""

    def say(self, text: str) -> None:
        """Show text."""
        ...

    def show(self, picture: ImageRecord) -> None:
        """Show a picture."""
        ...

    def reply(self, turn: int) -> str | None:
        """The player's reply; None when there is none any more."""
        ...


@dataclass(frozen=True)
class Game:
    """What a game is played with."""

    problem: Problem
    env: EnvParams
    rollout: RolloutParams
    seed: int
    caller: Caller = field(default_factory=Caller, compare=False, repr=False)


def with_env(params: Params, name: str | None) -> Params:
    """The params for an environment of polyturn by its short name, for "module:attr", or (None) the configured one.

    Another environment than the configured one has its own default params, and its own reward where that is not a
    graded answer.

    Raises:
        ValueError: there is no such environment.
    """
    path = name if name is None or ":" in name else f"polyturn.envs.{name}:build_env"
    if path is None or path == params.env.build:
        return params
    try:
        load_object(path, "--env")
    except ValueError as error:
        raise ValueError(f"{error}; polyturn has {', '.join(_short_names())}") from None
    changes: dict[str, object] = {"env": EnvParams(build=path)}
    if path in _TERMS:
        changes["reward"] = RewardParams(terms=(RewardTermParams(term=_TERMS[path]),))
    return params.model_copy(update=changes)


def _short_names() -> list[str]:
    files = sorted((Path(__file__).parents[1] / "envs").glob("*.py"))
    return [path.stem for path in files if "def build_env(" in path.read_text()]


def play(game: Game, screen: Screen) -> Trajectory:
    """Play to the end; a failure of the environment ends the game as it ends a rollout."""
    return asyncio.run(_play(game, screen))


async def _play(game: Game, screen: Screen) -> Trajectory:
    turns: list[Turn] = []
    env: Env | None = None
    try:
        env = cast(
            "Env",
            await _call(
                game,
                build,
                load_object(game.env.build, "env.build"),
                _context(game),
                on_late=discard,
            ),
        )
        await _open(game, env, screen)
        reason = await _turns(game, env, screen, turns)
        error = None
    except TimeoutError:
        reason = StopReason.ENV_TIMEOUT
        error = f"no answer within env.step_timeout_s {game.env.step_timeout_s:g}"
    except FileNotFoundError as failure:
        reason = StopReason.ENV_ERROR
        error = f"{failure.filename} is missing; `dvc checkout` brings outputs back, `dvc repro` makes them anew"
    except Exception as failure:  # a bad environment ends the game, not the program
        reason, error = StopReason.ENV_ERROR, f"{type(failure).__name__}: {failure}"
    finally:
        if close := getattr(env, "close", None):
            await _call(game, close)
        game.caller.end()
    return _trajectory(game.problem, turns, reason, error)


async def _open(game: Game, env: Env, screen: Screen) -> None:
    for message in game.problem.messages:
        _show(message, screen)
    if reset := reset_of(env, _context(game).seed):
        first = await _call(game, first_message, env, await _call(game, reset))
        if first is not None:
            _show(cast("Message", first), screen)
    tools = cast("Sequence[ToolSchema]", getattr(env, "tools", ()) or ())
    for line in tool_lines(tools):
        screen.say(line)


async def _turns(game: Game, env: Env, screen: Screen, turns: list[Turn]) -> StopReason:
    while (text := screen.reply(len(turns) + 1)) is not None:
        answered = await _call(game, env.step, text)
        observation, is_done, info = cast("tuple[object, object, object]", answered)
        message = None if is_done else await _call(game, observation_message, env, observation)
        is_last = len(turns) + 1 >= game.rollout.max_turns
        shown = None if is_last else cast("Message | None", message)
        turns.append(Turn((), (), text, shown, plain_info(info)))
        if is_done:
            return StopReason.ENV_DONE
        if is_last:
            return StopReason.MAX_TURNS
        if shown is not None:
            _show(shown, screen)
    return StopReason.ABORT


def _show(message: Message, screen: Screen) -> None:
    screen.say(f"[{message.role}]")
    for part in message.content:
        if isinstance(part, ImageRecord):
            screen.show(part)
        elif part.strip():
            screen.say(part.strip())


def tool_lines(tools: Sequence[ToolSchema]) -> list[str]:
    """How to call the tools, one line each with the call's form."""
    lines: list[str] = []
    for tool in tools:
        function = cast("Mapping[str, Json]", tool.get("function", tool))
        schema = cast("Mapping[str, Json]", function.get("parameters") or {})
        properties = cast("Mapping[str, Mapping[str, Json]]", schema.get("properties") or {})
        arguments = {name: _hint(known) for name, known in properties.items()}
        form = json.dumps(
            {"name": function.get("name"), "arguments": arguments}, ensure_ascii=False
        )
        lines.append(f"tool: <tool_call>{form}</tool_call>")
    return lines


def _hint(schema: Mapping[str, Json]) -> str:
    if isinstance(values := schema.get("enum"), Sequence):
        return "|".join(map(str, values))
    return str(schema.get("description") or schema.get("type") or "...")


def outcome_lines(trajectory: Trajectory, reward: Reward | None) -> list[str]:
    """How it ended: why, the reward and its terms, the reference answer."""
    lines = [f"{trajectory.status} ({trajectory.stop_reason}) after {len(trajectory.turns)} turns"]
    if trajectory.error:
        lines.append(trajectory.error)
    if reward is None:
        lines.append("no reward")
    else:
        terms = ", ".join(f"{name} {value:g}" for name, value in reward.terms.items())
        lines.append(f"reward {reward.total:g} ({terms})")
    return [*lines, f"reference answer: {trajectory.problem.answer}"]


def grade(trajectory: Trajectory, params: Params) -> Reward | None:
    """The reward by the configured terms; None for a trajectory that carries none."""
    if not trajectory.status.is_rewarded:
        return None
    return score(trajectory, trajectory.problem, params.reward)


def _context(game: Game) -> EnvContext:
    seed = derive(game.seed, game.problem.id, 0, "env")
    return EnvContext(game.problem, game.env.params, game.rollout.max_turns, seed)


async def _call(
    game: Game,
    method: Callable[..., object],
    *args: object,
    on_late: Callable[[object], object] | None = None,
) -> object:
    limit_s = game.env.step_timeout_s
    return await game.caller.call(method, *args, time_limit_s=limit_s, on_late=on_late)


def _trajectory(
    problem: Problem, turns: Sequence[Turn], reason: StopReason, error: str | None
) -> Trajectory:
    made = tuple(image for turn in turns if turn.observation for image in turn.observation.images)
    return Trajectory(
        problem=problem,
        group_index=0,
        sibling=0,
        turns=tuple(turns),
        token_ids=np.zeros(0, np.int64),
        loss_mask=np.zeros(0, np.int8),
        logprobs=np.zeros(0, np.float32),
        images=(*problem.images, *made),
        stop_reason=reason,
        policy_version=0,
        error=error,
    )
