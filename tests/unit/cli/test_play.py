"""Playing by hand: any environment, any problem, the reward of a rollout, and pictures where a terminal shows them."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from polyturn import layout
from polyturn.cli import commands as cli
from polyturn.cli import play, terminal
from polyturn.cli.play import Game, grade, outcome_lines, tool_lines, with_env
from polyturn.data.files import write_jsonl
from polyturn.evaluation.pick import pick
from polyturn.params import parse
from polyturn.types import ImageRecord, StopReason, Trajectory
from tests.unit import tiny

CALL = '<tool_call>{"name": "zoom", "arguments": {"region": "northwest"}}</tool_call>'
PARAMS = parse({"data": {"source": "synthetic"}})


@dataclass
class Scripted:
    """A screen with prepared replies that keeps what it is shown."""

    replies: list[str]
    said: list[str] = field(default_factory=list)
    pictures: list[ImageRecord] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, picture: ImageRecord) -> None:
        self.pictures.append(picture)

    def reply(self, turn: int) -> str | None:
        return self.replies.pop(0) if self.replies else None


@pytest.fixture
def checkout(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: params.yaml and the recipes, nothing built."""
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    (tmp_path / "recipes").symlink_to(root / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(env: str, replies: list[str], **rollout: object) -> tuple[Trajectory, Scripted]:
    params = with_env(PARAMS.model_copy(update={"env": tiny.params().env}), env)
    limits = params.rollout.model_copy(update=rollout)
    screen = Scripted(replies)
    game = Game(tiny.problems()[0], params.env, limits, 0)
    return play.play(game, screen), screen


def test_a_call_is_answered_with_a_crop_and_the_answer_is_graded() -> None:
    problem = tiny.problems()[0]
    trajectory, screen = played("zoom", [CALL, f"\\boxed{{{problem.answer}}}"])
    assert [(p.width, p.height) for p in screen.pictures] == [(256, 256), (64, 64)]
    assert screen.pictures[0] == problem.images[0]
    assert [turn.info.get("region") for turn in trajectory.turns] == ["northwest", None]
    reward = grade(trajectory, PARAMS)
    assert outcome_lines(trajectory, reward) == [
        "completed (env_done) after 2 turns",
        "reward 1 (correctness 1)",
        f"reference answer: {problem.answer}",
    ]


def test_a_wrong_answer_has_reward_zero() -> None:
    trajectory, _ = played("zoom", ["\\boxed{999}"])
    assert outcome_lines(trajectory, grade(trajectory, PARAMS))[1] == "reward 0 (correctness 0)"


def test_the_last_turn_ends_the_game_as_it_ends_a_rollout() -> None:
    trajectory, screen = played("zoom", [CALL, CALL, CALL], max_turns=2)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(screen.pictures) == 2
    assert screen.replies == [CALL]


def test_no_more_input_aborts_without_a_reward() -> None:
    trajectory, _ = played("zoom", [CALL])
    assert grade(trajectory, PARAMS) is None
    assert outcome_lines(trajectory, None)[:2] == ["aborted (abort) after 1 turns", "no reward"]


@pytest.mark.parametrize("env", ["tests.unit.toy_envs:build_talker"])
def test_an_environment_that_breaks_ends_the_game_with_its_error(env: str) -> None:
    trajectory, _ = played(env, ["hello", "bad"])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "RuntimeError: the environment broke" in outcome_lines(trajectory, None)
    assert len(trajectory.turns) == 1


def test_an_unknown_environment_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"--env: module .*nowhere.*polyturn has .*zoom"):
        with_env(PARAMS, "nowhere")


def test_the_forms_of_calls_are_shown() -> None:
    _, screen = played("zoom", [])
    (line,) = [said for said in screen.said if said.startswith("tool: ")]
    form = json.loads(re.sub(r"</?tool_call>", "", line.removeprefix("tool: ")))
    assert form["name"] == "zoom"
    assert form["arguments"]["region"] == "northwest|northeast|southwest|southeast"
    assert tool_lines([{"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}]) == [
        'tool: <tool_call>{"name": "f", "arguments": {"x": "number"}}</tool_call>'
    ]


def test_a_generated_problem_is_that_of_the_synthetic_source(checkout: Path) -> None:
    problem = pick("generated:1", PARAMS, split="train")
    expected = tiny.problems(2)[1]
    assert (problem.id, problem.answer) == ("train/000001", expected.answer)
    assert problem.messages[0].text == expected.messages[0].text
    shown, wanted = (Image.open(io.BytesIO(p.images[0].read())) for p in (problem, expected))
    assert shown.tobytes() == wanted.tobytes()
    assert pick("1", PARAMS, split="train") == problem


def test_an_environment_with_a_source_of_its_own_draws_from_it(checkout: Path) -> None:
    params = with_env(PARAMS, "sokoban")
    problem = pick("generated", params, split="train")
    assert problem.metadata["level"]
    screen = Scripted([_moves(problem.metadata["solution"])])  # type: ignore[arg-type]
    trajectory = play.play(Game(problem, params.env, params.rollout, 0), screen)
    reward = grade(trajectory, params)
    assert reward is not None
    assert reward.total == 1.0


def _moves(moves: list[str]) -> str:
    call = {"name": "move", "arguments": {"directions": moves}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_problems_of_the_built_data_set_go_by_id_or_number(checkout: Path) -> None:
    record = tiny.picture()
    (layout.IMAGES / "png").mkdir(parents=True)
    (layout.IMAGES / "png" / f"{record.sha256}.png").write_bytes(record.read())
    image = {"sha256": record.sha256, "width": record.width, "height": record.height}
    write_jsonl(
        layout.PROBLEMS / "problems.jsonl",
        [
            {
                "id": name,
                "split": split,
                "problem": "<image>Find x.",
                "answer": name,
                "images": [image],
                "metadata": {},
            }
            for name, split in (("a", "train"), ("b", "test"), ("c", "train"))
        ],
    )
    assert pick("b", PARAMS, split="train").answer == "b"
    assert pick("1", PARAMS, split="train").id == "c"
    assert pick("generated", PARAMS, split="train").id == "train/000000"
    # those of the checkout have no levels: sokoban draws its own
    assert pick("1", with_env(PARAMS, "sokoban"), split="train").metadata["level"]
    with pytest.raises(ValueError, match="has no such id; its first is a"):
        pick("z", PARAMS, split="train")
    with pytest.raises(ValueError, match=r"split test of .* has 1 problems"):
        pick("1", PARAMS, split="test")


def test_a_name_without_a_built_data_set_says_what_to_do(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"no data set is built here \(make demo\)"):
        pick("train/7", PARAMS, split="train")


def test_the_command_plays_without_a_model(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "Let me look.\\\n" + CALL + "\nAnswer: \\boxed{1000}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert cli.main(["play", "--env", "zoom", "--problem", "generated:3"]) == 0
    shown = capsys.readouterr().out
    assert "picture runs/play/train_000003/1.png (64 x 64)" in shown
    assert "Not seen: - northeast southwest southeast" in shown
    assert "reward 0 (correctness 0)" in shown
    with Image.open(checkout / "runs/play/train_000003/0.png") as picture:
        assert picture.size == (256, 256)


def test_a_game_whose_picture_is_gone_says_how_it_comes_back_and_fails(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = {"sha256": "0" * 64, "width": 64, "height": 64}
    row = {"id": "a", "split": "train", "problem": "<image>Find x.", "answer": "1"}
    write_jsonl(layout.PROBLEMS / "problems.jsonl", [{**row, "images": [image], "metadata": {}}])
    monkeypatch.setattr(sys, "stdin", io.StringIO(CALL + "\n"))
    assert cli.main(["play", "--env", "zoom"]) == 1
    shown = capsys.readouterr().out
    assert f"{'0' * 64}.png is missing; `dvc checkout` brings outputs back" in shown


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"KITTY_WINDOW_ID": "1", "TERM": "xterm-256color"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/x"}, None),
        ({}, None),
    ],
)
def test_terminals_are_told_apart_by_their_environment(
    environment: dict[str, str], protocol: str | None
) -> None:
    assert terminal.inline_protocol(environment, is_terminal=True) == protocol
    assert terminal.inline_protocol(environment, is_terminal=False) is None


def test_kitty_gets_the_picture_in_pieces_of_4096() -> None:
    png = bytes(range(256)) * 20
    codes = terminal.inline(png, "kitty")
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", codes)
    assert [head for head, _ in parts] == ["f=100,a=T,m=1", "m=0"]
    assert base64.b64decode("".join(text for _, text in parts)) == png
    assert max(len(text) for _, text in parts) == 4096


def test_iterm_gets_the_picture_in_one_piece() -> None:
    assert terminal.inline(b"abc", "iterm2") == "\x1b]1337;File=inline=1;size=3:YWJj\a"


def test_a_plugin_of_the_current_directory_is_found_by_the_installed_command(
    checkout: Path, root: Path
) -> None:
    """-P starts Python as a console script does: without the current directory on its path."""
    (checkout / "plugins").mkdir()
    (checkout / "plugins" / "__init__.py").touch()
    (checkout / "plugins" / "own.py").write_text(
        "class Env:\n"
        "    def step(self, response_text):\n"
        "        return f'{response_text} it is', True, {}\n"
        "def build_env():\n"
        "    return Env()\n"
    )
    command = [sys.executable, "-P", "-m", "polyturn.cli", "play", "--env", "plugins.own:build_env"]
    done = subprocess.run(
        command,
        input="five\n",
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(root)},  # this code, wherever it is installed
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "completed (env_done) after 1 turns" in done.stdout


def test_what_is_wrong_with_a_generated_problem_depends_on_what_is_built(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"no data set is built here .* so it must be a number or"):
        pick("generated:x", PARAMS, split="train")
    write_jsonl(checkout / layout.PROBLEMS / "problems.jsonl", [])
    with pytest.raises(ValueError, match="--problem generated:x: it must be a number or generated"):
        pick("generated:x", PARAMS, split="train")
