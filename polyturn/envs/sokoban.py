"""Sokoban in pictures: push every box onto a goal; the board is shown again after every call of `move`.

Levels are drawn by the dataset source `load` (data.source: polyturn.envs.sokoban:load), whose sizes stand in
data.params; a breadth-first search proves each one solvable and gives a shortest solution. A level is written in
the usual characters: # wall, $ box, . goal, * box on goal, @ player, + player on goal.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from PIL import Image, ImageDraw
from pydantic import Field, ValidationError, model_validator

from polyturn.envs.base import Observation, image_record
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.tools import ToolCall, ToolCallError, parse_tool_calls
from polyturn.params.fields import NonNegativeInt, PositiveInt, Section
from polyturn.seeds import derive
from polyturn.types import ImageRecord, Json, Message, Problem, Trajectory

Cell = tuple[int, int]  # row, column

MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
QUESTION = "Push every box onto a goal."
TOOLS: Sequence[Mapping[str, Json]] = (
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Walk on the board, pushing the box ahead; shows the board again.",
            "parameters": {
                "type": "object",
                "properties": {
                    "direction": {"type": "string", "enum": list(MOVES)},
                    "directions": {
                        "type": "array",
                        "items": {"type": "string", "enum": list(MOVES)},
                        "description": "several moves, one after the other",
                    },
                },
            },
        },
    },
)
MAX_MOVES = 32  # of one call
_MAX_STATES = 60_000  # of one search; a level that needs more is not used
_MAX_ATTEMPTS = 2_000  # at one level


class LevelParams(Section):
    """data.params of the source: what the levels are like."""

    size: int = Field(default=6, ge=4, le=12)  # rows and columns, with the outer wall
    boxes: int = Field(default=1, ge=1, le=3)
    walls: NonNegativeInt = 2  # inside the outer wall
    min_moves: PositiveInt = 2  # of a shortest solution
    max_moves: PositiveInt = 12
    tile: int = Field(default=16, ge=8, le=64)  # pixels of a cell; see images.size_multiple

    @model_validator(mode="after")
    def _fits(self) -> LevelParams:
        cells, needed = (self.size - 2) ** 2, 2 * self.boxes + 1 + self.walls
        if needed > cells:
            raise ValueError(f"boxes, goals, walls and player need {needed} of {cells} cells")
        if self.max_moves < self.min_moves:
            raise ValueError(f"max_moves {self.max_moves} is below min_moves {self.min_moves}")
        return self


@dataclass(frozen=True)
class Board:
    """A position; cells are (row, column) from the upper left corner, the outer wall is part of `walls`."""

    size: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a goal."""
        return self.boxes <= self.goals

    def moved(self, direction: str) -> Board:
        """The position after a move; the same where a wall or a blocked box is ahead."""
        step = MOVES[direction]
        ahead = _add(self.player, step)
        if ahead in self.walls:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        beyond = _add(ahead, step)
        if beyond in self.walls or beyond in self.boxes:
            return self
        return replace(self, player=ahead, boxes=(self.boxes - {ahead}) | {beyond})

    def rows(self) -> list[str]:
        """The position in the usual characters, one text a row."""
        return [
            "".join(self._character((row, column)) for column in range(self.size))
            for row in range(self.size)
        ]

    @classmethod
    def of(cls, rows: Sequence[str]) -> Board:
        """Read a square position; `Board.of(board.rows()) == board`.

        Raises:
            ValueError: rows are not square, a character is unknown, or there is not one player and a goal per box.
        """
        cells = {(y, x): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
        found = {kind: frozenset(c for c, m in cells.items() if m in kind) for kind in _KINDS}
        walls, goals, boxes, players = (found[kind] for kind in _KINDS)
        is_square = all(len(row) == len(rows) for row in rows)
        if not is_square or set(cells.values()) - set("#.*+$@ "):
            raise ValueError(f"a level must be square rows of '#.*+$@ ', got {list(rows)}")
        if len(players) != 1 or not boxes or len(boxes) != len(goals):
            raise ValueError(f"a level needs one player and a goal per box, got {list(rows)}")
        return cls(len(rows), walls, goals, boxes, next(iter(players)))

    def _character(self, cell: Cell) -> str:
        if cell in self.walls:
            return "#"
        marks = {self.player: "@+"} | dict.fromkeys(self.boxes, "$*")
        return marks.get(cell, " .")[cell in self.goals]


_KINDS = ("#", ".*+", "$*", "@+")  # characters of walls, goals, boxes, player


def _add(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


# ---- levels ------------------------------------------------------------------------------------------------------


def solve(board: Board, max_states: int = _MAX_STATES) -> tuple[str, ...] | None:
    """A shortest solution, by breadth-first search; None where there is none within `max_states` positions."""
    came: dict[Board, tuple[Board, str] | None] = {board: None}
    waiting = deque([board])
    while waiting and len(came) <= max_states:
        here = waiting.popleft()
        if here.is_solved:
            return _path(came, here)
        for direction in MOVES:
            there = here.moved(direction)
            if there not in came and not (there.boxes != here.boxes and _is_stuck(there)):
                came[there] = (here, direction)
                waiting.append(there)
    return None


def _path(came: Mapping[Board, tuple[Board, str] | None], end: Board) -> tuple[str, ...]:
    moves: list[str] = []
    while step := came[end]:
        end, direction = step
        moves.append(direction)
    return tuple(reversed(moves))


def _is_stuck(board: Board) -> bool:
    """Whether a box stands in a corner that is no goal: it can never be moved again."""
    return any(
        {_add(box, (dy, 0)), _add(box, (0, dx))} <= board.walls
        for box in board.boxes - board.goals
        for dy in (-1, 1)
        for dx in (-1, 1)
    )


def generate(seed: int, params: LevelParams) -> tuple[Board, tuple[str, ...]]:
    """A solvable level and a shortest solution of min_moves to max_moves; equal arguments give equal levels.

    Raises:
        ValueError: no such level was found; data.params ask for too much.
    """
    rng = random.Random(seed)
    every = range(params.size)
    inner = [(row, column) for row in every[1:-1] for column in every[1:-1]]
    edge = frozenset((row, column) for row in every for column in every) - set(inner)
    for _ in range(_MAX_ATTEMPTS):
        cells = rng.sample(inner, params.walls + 2 * params.boxes + 1)
        walls, cells = cells[: params.walls], cells[params.walls :]
        goals, boxes, (player,) = cells[: params.boxes], cells[params.boxes : -1], cells[-1:]
        board = Board(params.size, edge | set(walls), frozenset(goals), frozenset(boxes), player)
        solution = None if _is_stuck(board) else solve(board)
        if solution is not None and params.min_moves <= len(solution) <= params.max_moves:
            return board, solution
    raise ValueError(
        f"data.params: no level with a solution of {params.min_moves} to {params.max_moves} moves in "
        f"{_MAX_ATTEMPTS} attempts; change size, boxes, walls, min_moves or max_moves"
    )


def load(split: str, *, seed: int, params: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Dataset source: an endless split of levels (data.num_* say how many are taken).

    The answer of a row is the length of its shortest solution; metadata: level (rows), solution, tile.

    Raises:
        ValueError: data.params are wrong; the message names the key.
    """
    wanted = level_params(params)
    for index in itertools.count():
        board, solution = generate(derive(seed, "sokoban", split, index), wanted)
        yield {
            "id": f"{split}/{index:06d}",
            "problem": f"<image>{QUESTION}",
            "answer": len(solution),
            "images": [draw(board, wanted.tile).read()],
            "level": board.rows(),
            "solution": list(solution),
            "tile": wanted.tile,
        }


def level_params(params: Mapping[str, object]) -> LevelParams:
    """Check data.params.

    Raises:
        ValueError: one line per wrong key.
    """
    try:
        return LevelParams.model_validate(dict(params))
    except ValidationError as error:
        lines = [
            f"data.params.{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}"
            for item in error.errors()
        ]
        raise ValueError("; ".join(lines)) from None


@functools.lru_cache(maxsize=20_000)
def draw(board: Board, tile: int) -> ImageRecord:
    """The board as a picture of size * tile pixels a side; equal boards give equal bytes."""
    image = Image.new("RGB", (board.size * tile, board.size * tile), "white")
    pen = ImageDraw.Draw(image)
    rim = max(1, tile // 8)

    def place(cell: Cell, margin: int) -> tuple[int, int, int, int]:
        top, left = cell[0] * tile, cell[1] * tile
        return left + margin, top + margin, left + tile - 1 - margin, top + tile - 1 - margin

    for cell in sorted(board.walls):
        pen.rectangle(place(cell, 0), fill=(70, 70, 70))
    for cell in sorted(board.boxes):
        colour = (40, 160, 60) if cell in board.goals else (190, 120, 40)
        pen.rectangle(place(cell, rim), fill=colour, outline=(60, 40, 20), width=rim)
    for cell in sorted(board.goals):
        pen.ellipse(place(cell, 3 * tile // 8), fill=(220, 30, 30))
    pen.ellipse(place(board.player, tile // 4), fill=(30, 60, 220))
    if board.player in board.goals:
        pen.ellipse(place(board.player, 3 * tile // 8), fill=(220, 30, 30))
    return image_record(image)


# ---- the environment ---------------------------------------------------------------------------------------------


class SokobanEnv:
    """One trajectory's board."""

    tools = TOOLS

    def __init__(self, board: Board, tile: int) -> None:
        self.board = board
        self._tile = tile
        self._num_moves = 0

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Json]]:
        """Walk as the last tool call of a reply says and show the board; a reply without a call gives up.

        Returns:
            Board and text, whether the level is solved or given up, and info: solved, boxes_on_goals, num_moves
            (of the trajectory), num_blocked (of this call) or error.
        """
        calls = parse_tool_calls(response_text)
        if not calls:
            return Observation(), True, self._info()
        moves = read_moves(calls[-1])
        if isinstance(moves, ToolCallError):
            text = moves.message if isinstance(calls[-1], ToolCallError) else moves.reason
            return Observation(text), False, {**self._info(), "error": moves.reason}
        num_blocked = 0
        for direction in moves:
            if self.board.is_solved:
                break
            after = self.board.moved(direction)
            num_blocked += after == self.board
            self._num_moves += 1
            self.board = after
        info: dict[str, Json] = {**self._info(), "tool": "move", "num_blocked": num_blocked}
        text = shown(self.board, num_blocked)
        return Observation(text, (draw(self.board, self._tile),)), self.board.is_solved, info

    def _info(self) -> dict[str, Json]:
        return {
            "solved": self.board.is_solved,
            "boxes_on_goals": len(self.board.boxes & self.board.goals),
            "num_moves": self._num_moves,
        }


def build_env(problem: Problem, params: Mapping[str, object]) -> SokobanEnv:
    """Make the environment of a problem of `load`; env.params are empty.

    Raises:
        ValueError: env.params are not empty, or the problem has no level in its metadata.
    """
    if params:
        raise ValueError(
            f"env.params: sokoban takes none, got {sorted(params)}; levels are set in data.params"
        )
    level, tile = problem.metadata.get("level"), problem.metadata.get("tile")
    if not isinstance(level, Sequence) or not isinstance(tile, int):
        raise ValueError(
            f"sokoban needs data.source: polyturn.envs.sokoban:load, but problem {problem.id} has no level "
            "in its metadata"
        )
    return SokobanEnv(Board.of(cast("Sequence[str]", level)), tile)


def read_moves(call: ToolCall | ToolCallError) -> Sequence[str] | ToolCallError:
    """The moves of a call, or what is wrong with it in words for the model."""
    if isinstance(call, ToolCallError):
        return call
    if call.name != "move":
        return ToolCallError(f"There is no tool {call.name[:40]!r}; call move.")
    given = call.arguments.get("directions", call.arguments.get("direction"))
    moves = [given] if isinstance(given, str) else given
    if not isinstance(moves, Sequence) or not moves or not all(m in MOVES for m in map(str, moves)):
        return ToolCallError(f"Give direction as one of {', '.join(MOVES)}, or directions.")
    if len(moves) > MAX_MOVES:
        return ToolCallError(f"Give at most {MAX_MOVES} directions in one call.")
    return [str(move) for move in moves]


def shown(board: Board, num_blocked: int) -> str:
    """What an answer says besides the picture.

    >>> shown(Board.of(["####", "#@ #", "#$.#", "####"]), 1)
    'Boxes on goals: 0 of 1. Blocked: 1.'
    """
    text = f"Boxes on goals: {len(board.boxes & board.goals)} of {len(board.boxes)}."
    return f"{text} Blocked: {num_blocked}." if num_blocked else text


def solved(trajectory: Trajectory, problem: Problem) -> float:
    """Reward term: 1.0 if every box came onto a goal."""
    del problem
    return float(any(turn.info.get("solved") is True for turn in trajectory.turns))


# ---- demonstrations for the warm start ---------------------------------------------------------------------------


def tool_call(moves: Sequence[str]) -> str:
    """The call that makes moves, as the demonstrations write it."""
    key, value = ("direction", moves[0]) if len(moves) == 1 else ("directions", list(moves))
    written = str(value).replace("'", '"') if isinstance(value, list) else f'"{value}"'
    return f'<tool_call>{{"name": "move", "arguments": {{"{key}": {written}}}}}</tool_call>'


def demonstrations(
    kind: str, problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    """`solve`: a shortest solution, params["moves_per_turn"] moves a call.

    Raises:
        ValueError: an unknown kind, or a problem that is not of `load`.
    """
    del rng
    if kind != "solve":
        raise ValueError(f"warmstart.phases: sokoban has the kind 'solve', got {kind!r}")
    env = build_env(problem, {})
    moves = [str(move) for move in cast("Sequence[Json]", problem.metadata["solution"])]
    turns: list[Say | Message] = []
    size = int(params["moves_per_turn"])
    for first in range(0, len(moves), size):
        call = tool_call(moves[first : first + size])
        seen = env.step(call)[0]
        turns += [Say(call), Message(seen.role, (*seen.images, seen.text))]
    return Demonstration(problem.messages, tuple(turns[:-1]), kind)


def texts() -> list[str]:
    """What this environment and its demonstrations say, for the tokenizer of a small model (model.small.texts)."""
    board = Board.of(["####", "#@ #", "#$.#", "####"])
    pairs = list(itertools.product(MOVES, repeat=2))
    calls = [tool_call(moves) for moves in [*((move,) for move in MOVES), *pairs]]
    return [QUESTION, shown(board, 0), shown(board, 1), *calls]
