"""`polyturn grade`: verdict with reason, files of cases, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyturn.cli.grading import main


def test_one_pair_prints_verdict_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["\\boxed{12√2}", "12\\sqrt{2}"]) == 0
    assert capsys.readouterr().out == "match: equal (answer '12√2')\n"
    assert main(["\\boxed{8} or \\boxed{", "9"]) == 1
    assert (
        capsys.readouterr().out
        == "no match: different values (answer '8', a later box is never closed)\n"
    )
    assert main(["\\boxed{5", "5"]) == 1
    assert capsys.readouterr().out == "no match: no answer found (a box is never closed)\n"
    assert main(["5", "5", "--needs-box"]) == 1
    assert capsys.readouterr().out == "no match: no answer found\n"


def test_options_reach_the_grader() -> None:
    assert main(["3\\sqrt{2}", "4.24"]) == 0
    assert main(["3\\sqrt{2}", "4.24", "--rounding", "strict"]) == 1
    assert main(["4.2", "4.24", "--tolerance", "0.01"]) == 0
    assert main(["41", "41", "--needs-box"]) == 1


def test_a_file_shows_disagreements_and_the_agreement_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "id": "a",
            "prediction": "5",
            "reference": "5",
            "expected": True,
            "kind": "pair",
            "scope": "scalar",
        },
        {
            "id": "b",
            "prediction": "5",
            "reference": "6",
            "expected": True,
            "kind": "pair",
            "scope": "scalar",
        },
        {
            "id": "c",
            "prediction": "5",
            "reference": None,
            "expected": False,
            "kind": "pair",
            "scope": "other",
        },
        {
            "id": "d",
            "prediction": "The answer is 5",
            "reference": "5",
            "expected": False,
            "profile": "boxed",
        },
        {"prediction": "7", "reference": "7.0"},
    ]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert main(["--file", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "b\tDISAGREES: no match: different values (answer '5')\treference '6'",
        "5\tmatch: equal (answer '7')\treference '7.0'",
        "case         2/2 agree",
        "pair other   1/1 agree",
        "pair scalar  1/2 agree",
        "all          4/5 agree",
    ]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"prediction": "5"}'])
def test_a_bad_line_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f'{{"prediction": "5", "reference": "5"}}\n{line}\n')
    assert main(["--file", str(path)]) == 2
    assert "cases.jsonl:2" in capsys.readouterr().err


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    no_tolerance = [["5", "5", "--tolerance", value] for value in ("-1", "nan", "inf")]
    no_time = [["5", "5", "--timeout-s", value] for value in ("0", "-1", "nan")]
    for arguments in ([], ["5"], ["5", "5", "--file", "x"], *no_tolerance, *no_time):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert main(["--file", "no-such-file.jsonl"]) == 2
    assert "--file no-such-file.jsonl: No such file" in capsys.readouterr().err


def test_a_line_ends_where_json_lines_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python counts more characters as ends of lines than JSON lines have: U+2028, U+0085, ..."""
    odd = "".join(map(chr, (0x2028, 0x2029, 0x85)))
    row = {"prediction": f"So{odd}Answer: 5", "reference": "5", "expected": True}
    (tmp_path / "cases.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n")
    assert main(["--file", str(tmp_path / "cases.jsonl")]) == 0
    assert "all" in capsys.readouterr().out
