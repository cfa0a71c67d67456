"""Sokoban: moves by the rules, levels that are proved solvable, a picture after every call, any reply survived."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from polyturn.data.sources import load_source
from polyturn.envs import sokoban
from polyturn.envs.base import EnvContext, build, load_object
from polyturn.envs.demonstration import Say
from polyturn.envs.sokoban import (
    MAX_MOVES,
    MOVES,
    Board,
    LevelParams,
    SokobanEnv,
    build_env,
    demonstrations,
    draw,
    generate,
    level_params,
    solve,
    tool_call,
)
from polyturn.params import DataParams, EnvParams, ImagesParams, RolloutParams
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.types import Json, Message, Problem, Status, StopReason
from tests.unit import tiny

ROWS = (
    "#####",
    "#@  #",
    "# $ #",
    "#  .#",
    "#####",
)  # right, down: the box goes down; then around it


def problem(rows: Sequence[str] = ROWS, tile: int = 16, **metadata: Json) -> Problem:
    """A problem as the source and the images stage make it."""
    picture = draw(Board.of(rows), tile)
    message = Message("user", (picture, sokoban.QUESTION))
    return Problem("s", "train", (message,), "3", {"level": list(rows), "tile": tile, **metadata})


def test_rows_and_positions_are_two_forms_of_one_thing() -> None:
    for rows in (ROWS, ("####", "#+*#", "#$ #", "####")):
        assert Board.of(rows).rows() == list(rows)


@pytest.mark.parametrize(
    "rows",
    [
        ("####", "#@$#", "####"),
        ("####", "#@$#", "#  #", "####"),
        ("####", "#.$#", "#  #", "####"),
        ("####", "#@$#", "#.x#", "####"),
        ("####", "#@@#", "#.$#", "####"),
        ("####", "#@ #", "#  #", "####"),
    ],
)
def test_a_level_that_is_none_is_refused(rows: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"a level (must be|needs)"):
        Board.of(rows)


def test_a_push_moves_the_box_ahead_and_a_pull_is_no_move() -> None:
    board = Board.of(ROWS).moved("right")
    assert board.rows() == ["#####", "# @ #", "# $ #", "#  .#", "#####"]
    pushed = board.moved("down")
    assert pushed.rows() == ["#####", "#   #", "# @ #", "# $.#", "#####"]
    assert pushed.moved("up").rows()[3] == "# $.#", "the box stays behind"


def test_walls_and_a_box_with_something_behind_it_block() -> None:
    board = Board.of(("######", "#@$$.#", "#   .#", "#    #", "#    #", "######"))
    assert board.moved("up") == board, "a wall"
    assert board.moved("right") == board, "a box behind the box"
    against = Board.of(("####", "#@$#", "#. #", "####"))
    assert against.moved("right") == against, "a wall behind the box"


def test_the_search_finds_a_shortest_solution() -> None:
    # The box needs one push down and one to the right; to get from behind the one to behind the other takes
    # two more moves, and to get to the first takes one: five in all, in either order.
    assert solve(Board.of(ROWS)) in {
        ("right", "down", "left", "down", "right"),
        ("down", "right", "up", "right", "down"),
    }


def test_the_search_says_when_there_is_no_solution() -> None:
    assert solve(Board.of(("#####", "#$@ #", "#   #", "#  .#", "#####"))) is None, "box in a corner"
    assert solve(Board.of(("#####", "#@  #", "#$  #", "#  .#", "#####"))) is None, "box at a wall"
    assert solve(Board.of(ROWS), max_states=3) is None, "beyond its limit it gives up"


@pytest.mark.parametrize(
    "wanted",
    [
        LevelParams(),
        LevelParams(size=5, walls=0, min_moves=1),
        LevelParams(size=7, boxes=2, walls=4, max_moves=40),
        LevelParams(size=6, boxes=3, walls=0, max_moves=40),
    ],
)
def test_every_level_is_solved_by_its_solution_and_is_as_asked_for(wanted: LevelParams) -> None:
    for seed in range(6):
        board, solution = generate(seed, wanted)
        assert len(board.boxes) == len(board.goals) == wanted.boxes
        assert len(board.walls) == 4 * (wanted.size - 1) + wanted.walls
        assert wanted.min_moves <= len(solution) <= wanted.max_moves
        for direction in solution:
            assert not board.is_solved, "the solution has no move too many"
            after = board.moved(direction)
            assert after != board, "no move of a shortest solution is blocked"
            board = after
        assert board.is_solved


def test_equal_seeds_give_equal_levels_and_others_differ() -> None:
    wanted = LevelParams()
    assert generate(3, wanted) == generate(3, wanted)
    assert len({generate(seed, wanted)[0] for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": 3}, r"data\.params\.size"),
        ({"boxes": 4}, r"data\.params\.boxes"),
        ({"colour": "red"}, r"data\.params\.colour"),
        ({"size": 4, "boxes": 2}, "need 7 of 4 cells"),
        ({"min_moves": 9, "max_moves": 8}, "max_moves 8 is below min_moves 9"),
    ],
)
def test_wrong_level_params_name_the_key(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        level_params(params)


def test_levels_that_cannot_be_found_are_refused_with_the_keys() -> None:
    with pytest.raises(ValueError, match=r"data\.params: no level .* change size"):
        generate(0, LevelParams(size=4, walls=0, min_moves=30, max_moves=40))


def test_pictures_show_each_cell_and_depend_on_the_position_alone() -> None:
    board = Board.of(ROWS)
    image = Image.open(io.BytesIO(draw(board, 16).read()))
    assert (image.size, image.mode) == ((80, 80), "RGB")

    def centre(row: int, column: int) -> object:
        return image.getpixel((column * 16 + 8, row * 16 + 8))

    assert centre(0, 0) == (70, 70, 70), "wall"
    assert centre(1, 1) == (30, 60, 220), "player"
    assert centre(2, 2) == (190, 120, 40), "box"
    assert centre(3, 3) == (220, 30, 30), "goal"
    assert centre(1, 3) == (255, 255, 255), "floor"
    assert draw(Board.of(ROWS), 16).sha256 == draw(board, 16).sha256
    on_goal = draw(Board.of(("####", "#@ #", "# *#", "####")), 32)
    pixel = Image.open(io.BytesIO(on_goal.read())).getpixel((2 * 32 + 10, 2 * 32 + 10))
    assert pixel == (40, 160, 60), "a box on a goal looks different"


def test_the_source_gives_rows_of_derived_levels() -> None:
    source = load_source(
        DataParams(source="polyturn.envs.sokoban:load", params={"size": 5, "walls": 1}),
        ImagesParams(),
        seed=7,
        work_dir=None,  # type: ignore[arg-type]
    )
    rows, again = (list(itertools.islice(source.load("train"), 3)) for _ in range(2))
    assert rows == again
    for row in rows:
        assert isinstance(row, dict)
        board = Board.of(row["level"])
        assert row["answer"] == len(row["solution"]) == len(solve(board) or ())
        assert row["images"] == [draw(board, 16).read()]
    other = next(iter(source.load("test")))
    assert other["level"] not in [row["level"] for row in rows]  # type: ignore[index, call-overload]


def test_each_call_shows_the_board_until_it_is_solved() -> None:
    env = build_env(problem(), {})
    observation, done, info = env.step(tool_call(["right", "down"]))
    assert not done
    assert observation.images == (
        draw(Board.of(("#####", "#   #", "# @ #", "# $.#", "#####")), 16),
    )
    assert observation.text == "Boxes on goals: 0 of 1."
    assert (info["num_moves"], info["num_blocked"], info["solved"]) == (2, 0, False)
    observation, done, info = env.step(tool_call(["left"]) + tool_call(["up", "up"]))
    assert info["num_moves"] == 4, "the last call of a reply counts"
    assert (info["num_blocked"], observation.text) == (1, "Boxes on goals: 0 of 1. Blocked: 1.")
    rest = ["left", "down", "down", "right"]
    observation, done, info = env.step(tool_call([*rest, "up", "up"]))
    assert done
    assert info == {
        "solved": True,
        "boxes_on_goals": 1,
        "num_moves": 8,
        "num_blocked": 0,
        "tool": "move",
    }, "moves after the solution are not made"


def test_a_reply_without_a_call_gives_up() -> None:
    observation, done, info = build_env(problem(), {}).step("I give up.")
    assert (observation.images, done, info["solved"]) == ((), True, False)


def written(arguments: object, name: str = "move") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (written({"direction": "north"}), "up, down, left, right"),
        (written({"direction": None}), "up, down, left, right"),
        (written({"direction": 3}), "up, down, left, right"),
        (written({"directions": []}), "up, down, left, right"),
        (written({"directions": ["up", ["down"]]}), "up, down, left, right"),
        (written({"directions": {"up": 1}}), "up, down, left, right"),
        (written({}), "up, down, left, right"),
        (written({"directions": ["up"] * (MAX_MOVES + 1)}), f"at most {MAX_MOVES}"),
        (written({"direction": "up"}, "walk"), "no tool 'walk'"),
        ("<tool_call>{up}", "could not be read"),
    ],
)
def test_a_wrong_call_is_answered_with_what_to_write(reply: str, told: str) -> None:
    env = build_env(problem(), {})
    observation, done, info = env.step(reply)
    assert told in observation.text
    assert not done
    assert info["error"]
    assert env.board == Board.of(ROWS), "nothing moved"


@given(
    st.text(max_size=60)
    | st.builds(
        written,
        st.dictionaries(
            st.sampled_from(["direction", "directions"]),
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.sampled_from([*MOVES, "x"]), st.lists
            ),
        ),
    )
)
@settings(max_examples=100, deadline=None)
def test_no_reply_breaks_the_environment(reply: str) -> None:
    env = build_env(problem(), {})
    observation, done, info = env.step(reply)
    assert json.dumps(info)
    assert done or observation.text


def test_a_problem_of_another_source_and_params_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"needs data\.source: polyturn\.envs\.sokoban:load, but problem train-0"
    ):
        build_env(tiny.problems(1)[0], {})
    with pytest.raises(ValueError, match=r"env\.params: sokoban takes none, got \['size'\]"):
        build_env(problem(), {"size": 5})


@pytest.mark.parametrize("moves_per_turn", [1, 2, 9])
def test_the_demonstration_plays_the_solution(moves_per_turn: int) -> None:
    solution = list(solve(Board.of(ROWS)) or ())
    shown = demonstrations(
        "solve", problem(solution=solution), random.Random(0), {"moves_per_turn": moves_per_turn}
    )
    env = build_env(problem(), {})
    replies = [turn.text for turn in shown.turns if isinstance(turn, Say)]
    assert len(replies) == -(-len(solution) // moves_per_turn)
    answers = [env.step(reply) for reply in replies]
    assert [done for _, done, _ in answers] == [False] * (len(replies) - 1) + [True]
    seen = [turn for turn in shown.turns if isinstance(turn, Message)]
    assert [message.images for message in seen] == [answer[0].images for answer in answers[:-1]]
    with pytest.raises(ValueError, match="kind 'solve', got 'read'"):
        demonstrations("read", problem(), random.Random(0), {})


def test_a_policy_plays_through_the_rollout_and_is_paid_for_solved_levels(
    renderer: Renderer,
) -> None:
    builder = load_object("polyturn.envs.sokoban:build_env", "env.build")
    assert isinstance(build(builder, EnvContext(problem())), SokobanEnv)
    chosen = {
        "0/0": [("right", "down"), ("left", "down", "right")],
        "0/1": [("right",), ("down",), ("up",)],
    }
    sampler = tiny.ScriptedSampler(
        renderer, lambda request, turn: tool_call(chosen[request.session][turn])
    )
    how = RolloutSettings(
        EnvParams(build="polyturn.envs.sokoban:build_env"),
        RolloutParams(
            max_turns=3, max_turn_tokens=None, max_new_tokens=400, max_context_tokens=2048
        ),
        tiny.params(reward={"terms": [{"term": "polyturn.envs.sokoban:solved"}]}).reward,
    )
    (group,) = asyncio.run(rollout([problem()], sampler, renderer, how, Draw(1, 2, 1.0)))
    first, second = group.trajectories
    assert (first.stop_reason, first.reward, len(first.images)) == (StopReason.ENV_DONE, 1.0, 2)
    assert (second.stop_reason, second.reward, len(second.images)) == (StopReason.MAX_TURNS, 0.0, 3)
    assert {t.status for t in group.trajectories} == {Status.COMPLETED}
    board = Board.of(ROWS).moved("right")
    assert second.images[1] == draw(board, 16), "the board after the first move"
