"""problems.jsonl <-> Problem nouns, and the fit of prompts."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from polyturn.data import fit, problem_row, quarantine, read_problems, urls
from polyturn.data.files import write_jsonl
from polyturn.data.problems import split_tags
from polyturn.types import ImageRecord, Message, Problem

RECORD = {"sha256": "ab" * 32, "width": 32, "height": 16}


def _line(problem: object = "<image>Find $x$.", **changed: object) -> dict[str, object]:
    row: dict[str, object] = {
        "id": "train/000000",
        "split": "train",
        "problem": problem,
        "answer": "0",
        "images": [RECORD],
        "metadata": {"label": 3},
    }
    return {**row, **changed}


def test_tags_become_pictures_where_they_stand() -> None:
    first, second = (ImageRecord(name, 16, 16) for name in ("a", "b"))
    message = split_tags("user", "See <image> and <image>.", [first, second])
    assert message.content == ("See ", first, " and ", second, ".")
    assert message.text == "See  and ."


def test_rows_become_problems_whose_pictures_lie_in_the_store(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "problems.jsonl", [_line()])
    [problem] = read_problems(tmp_path / "problems.jsonl", tmp_path)
    [image] = problem.images
    assert image == ImageRecord("ab" * 32, 32, 16)
    assert image.path == tmp_path / "png" / f"{'ab' * 32}.png"
    assert problem.messages == (Message("user", (image, "Find $x$.")),)
    assert (problem.answer, problem.metadata) == ("0", {"label": 3})


@pytest.mark.parametrize(
    "prompt",
    [
        "<image>Find $x$.",
        "Find <image> $x$.",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<image>Find $x$."},
        ],
    ],
)
def test_problem_row_is_the_inverse_of_reading(tmp_path: Path, prompt: object) -> None:
    line = _line(prompt)
    write_jsonl(tmp_path / "problems.jsonl", [line])
    [problem] = read_problems(tmp_path / "problems.jsonl", tmp_path)
    assert problem_row(problem) == line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (_line("Find $x$."), "1 pictures without a tag"),
        (_line("<image><image>"), "2 <image> tags for 1 pictures"),
        ({"id": "a"}, "KeyError"),
        (_line([{"role": "robot", "content": "<image>"}]), "robot"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: dict[str, object], message: str) -> None:
    write_jsonl(tmp_path / "problems.jsonl", [_line(), line])
    with pytest.raises(ValueError, match=r"problems.jsonl, line 2") as error:
        read_problems(tmp_path / "problems.jsonl", tmp_path)
    assert message in str(error.value)


def test_prompts_beyond_the_limit_are_set_aside_by_name() -> None:
    problems = [
        Problem(f"p{n}", "test", (Message("user", ("x" * n,)),), answer="1") for n in (3, 4, 5)
    ]
    kept, set_aside = fit(problems, lambda problem: len(problem.messages[0].text), 4)
    assert [problem.id for problem in kept] == ["p3", "p4"]
    [row] = set_aside
    assert (row.id, row.split, row.stage, row.reason) == ("p5", "test", "model", "prompt_too_long")
    assert "5 tokens" in row.detail


def test_examples_in_docstrings_are_true() -> None:
    for module in (quarantine, urls):
        result = doctest.testmod(module)
        assert (result.failed, result.attempted) == (0, 1)


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def rows():
        yield {"a": 1}
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_jsonl(tmp_path / "rows.jsonl", rows())
    assert list(tmp_path.iterdir()) == []
