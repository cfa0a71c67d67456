"""The digest of an evaluation set, its sealed part, and the rows that results are kept as."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from polyturn.data.files import write_jsonl
from polyturn.evaluation import evaluation_set, results
from polyturn.evaluation.evaluation_set import choose, digest, digest_of, is_sealed
from polyturn.evaluation.results import ProblemResult
from polyturn.params import Params
from polyturn.types import Problem


def params(**sections: object) -> Params:
    return Params.model_validate(sections)


def problems(number: int) -> list[Problem]:
    test = [Problem(f"test/{i:06d}", "test", (), "1") for i in range(number)]
    return [*test, Problem("train/0", "train", (), "1")]


def test_the_docstring_examples_hold():
    assert doctest.testmod(evaluation_set).failed == 0
    assert doctest.testmod(results).failed == 0


def test_the_digest_depends_on_problems_order_and_settings():
    lines = ['{"id": 1}\n', '{"id": 2}']
    found = digest_of(lines, {"temperature": 1.0, "k": 1})
    assert found == digest_of([line.strip() for line in lines], {"k": 1, "temperature": 1.0})
    assert found != digest_of(reversed(lines), {"temperature": 1.0, "k": 1})
    assert found != digest_of(lines, {"temperature": 0.5, "k": 1})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"id": f"test/{i:06d}", "split": "test", "answer": "1"} for i in range(40)]
    rows += [{"id": "train/0", "split": "train", "answer": "2"}]
    write_jsonl(tmp_path / "problems.jsonl", rows)
    return tmp_path / "problems.jsonl"


@pytest.mark.parametrize(
    ("sections", "is_same"),
    [
        ({"rollout": {"max_turns": 3}}, False),
        ({"evaluate": {"samples_per_problem": 2}}, False),
        ({"env": {"eval_params": {"oracle": False}}}, False),
        ({"evaluate": {"sealed_fraction": 0.5}}, False),
        ({"evaluate": {"bootstrap_samples": 7}}, True),
        ({"seed": 5, "train": {"steps": 3}}, True),
    ],
)
def test_what_decides_how_replies_are_scored_is_in_the_digest_of_the_set(
    file: Path, sections: dict[str, object], is_same: bool
):
    assert (digest(file, params()) == digest(file, params(**sections))) == is_same


def test_other_code_of_grader_term_or_environment_is_another_set(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    before = digest(file, params())
    asked: list[str] = []

    def other(modules: Iterable[str]) -> str:
        asked.extend(modules)
        return "other code"

    monkeypatch.setattr(evaluation_set, "code_digest", other)
    assert digest(file, params()) != before
    assert set(asked) == {"polyturn.reward", "polyturn.grading", "polyturn.envs.zoom"}


def test_other_splits_are_not_part_of_the_set(file: Path):
    before = digest(file, params())
    file.write_text(file.read_text().replace('"answer": "2"', '"answer": "3"'))
    assert digest(file, params()) == before
    file.write_text(file.read_text().replace('"answer": "1"', '"answer": "3"', 1))
    assert digest(file, params()) != before


def test_the_sealed_part_is_about_its_share_disjoint_and_complete():
    loaded = params(evaluate={"sealed_fraction": 0.25})
    rows = problems(2000)
    sealed = {p.id for p in choose(rows, loaded, "sealed")}
    left = {p.id for p in choose(rows, loaded)}
    assert not sealed & left
    assert len(sealed | left) == 2000
    assert 0.22 < len(sealed) / 2000 < 0.28


def test_a_problem_stays_sealed_when_the_dataset_or_the_fraction_grows():
    few = params(evaluate={"sealed_fraction": 0.1})
    more = params(evaluate={"sealed_fraction": 0.3})
    small = {p.id for p in choose(problems(300), few, "sealed")}
    assert small <= {p.id for p in choose(problems(900), few, "sealed")}
    assert small <= {p.id for p in choose(problems(300), more, "sealed")}
    assert not any(is_sealed(f"test/{i}", 0.0) for i in range(1000))


@pytest.mark.parametrize(
    ("rows", "part", "message"),
    [
        ([], "open", r"data\.num_test"),
        (problems(5), "sealed", r"evaluate\.sealed_fraction is 0: none of the 5 test problems"),
    ],
)
def test_an_empty_part_is_named_with_its_key(rows: list[Problem], part: str, message: str):
    with pytest.raises(ValueError, match=message):
        choose(rows, params(), part)  # type: ignore[arg-type]


def test_both_parts_have_digests_of_their_own(file: Path):
    loaded = params(evaluate={"sealed_fraction": 0.5})
    assert digest(file, loaded, "sealed") != digest(file, loaded, "open")


def test_results_come_back_as_they_were(tmp_path: Path):
    found = ProblemResult(
        "test/1", "12", {"policy/sampled": (True, False)}, "square area", "Find é", ("ab" * 32,),
        {"policy/sampled": "12"},
    )  # fmt: skip
    write_jsonl(tmp_path / "r.jsonl", [results.to_row(found)])
    assert results.read(tmp_path / "r.jsonl") == [found]
    assert found.share() == 0.5


def test_rows_of_an_older_version_are_read(tmp_path: Path):
    write_jsonl(
        tmp_path / "r.jsonl", [{"id": "a", "answer": "1", "correct": {"policy/sampled": [True]}}]
    )
    (row,) = results.read(tmp_path / "r.jsonl")
    assert (row.kind, row.question, row.replies, row.share()) == ("", "", {}, 1.0)


@pytest.mark.parametrize("line", ['{"id": "a"}', '{"id": "a", "answer": "1", "correct": [1]}', "{"])
def test_a_damaged_row_is_named_by_file_and_line(tmp_path: Path, line: str):
    good = json.dumps({"id": "a", "answer": "1", "correct": {}})
    (tmp_path / "r.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2"):
        results.read(tmp_path / "r.jsonl")
