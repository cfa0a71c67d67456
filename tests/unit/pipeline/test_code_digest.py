"""A digest of code changes with what it does, not with how it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.pipeline.code_digest import code_digest


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graded_package").mkdir()
    (tmp_path / "graded_package" / "__init__.py").write_text("")

    def put(text: str, name: str = "part") -> str:
        (tmp_path / "graded_package" / f"{name}.py").write_text(text)
        return code_digest(["graded_package"])

    return put


def test_only_what_code_does_counts(write) -> None:
    before = write("def f(x):\n    return x + 1\n")
    same = (
        '"""Doc."""\n\n\ndef f(x):  # why\n    """More doc."""\n    return (x +\n            1)\n'
    )
    assert write(same) == before
    assert write("def f(x):\n    return x + 2\n") != before
    assert write("def g(x):\n    return x + 1\n") != before
    assert write('def f(x):\n    return "doc"\n') != write('def f(x):\n    return "dog"\n')


def test_a_new_file_counts_and_absent_modules_count_by_name(write) -> None:
    before = write("x = 1\n")
    assert write("y = 1\n", "other") != before
    assert code_digest(["absent.module"]) != code_digest(["absent.other"])
    assert code_digest(["sys", "absent"]) == code_digest(["absent", "sys", "absent"])
