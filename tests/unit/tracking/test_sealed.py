"""The sealed part of the test split: opened once per version, counted, and the last word of a promotion."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn import layout, params
from polyturn.cli import commands as cli
from polyturn.data.files import write_jsonl
from polyturn.evaluation import evaluation_set
from polyturn.evaluation.results import RESULTS, SCORE, ProblemResult, to_row
from polyturn.params import TrackingParams
from polyturn.pictures import Pictures
from polyturn.tracking import evaluations, open_run, openings
from polyturn.tracking.store import connect
from tests.unit.tracking.scored import PARAMS, candidate, submit, write_params

NUM = 80


@pytest.fixture
def project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """v1 is champion, v2 as good on the open problems; the sealed part has been opened for both."""
    monkeypatch.chdir(project)
    write_params(project, evaluate={"sealed_fraction": 0.5})
    rows = [
        {"id": f"test/{i}", "split": "test", "problem": "x?", "answer": "1", "images": [], "metadata": {}}
        for i in range(NUM)
    ]  # fmt: skip
    write_jsonl(project / layout.PROBLEMS / "problems.jsonl", rows)
    for weights in ("a", "b"):
        submit(project, candidate(project, weights, 0.5))
    return project


def opened(project: Path, label: str, *, share: float) -> str:
    """Record an opening as scoring would; the first `share` of the sealed problems is right. Returns the digest."""
    loaded = params.load(project / layout.PARAMS)
    file = project / layout.PROBLEMS / "problems.jsonl"
    ids = [f"test/{i}" for i in range(NUM) if evaluation_set.is_sealed(f"test/{i}", 0.5)]
    found = [
        ProblemResult(name, "1", {SCORE: (i < share * len(ids),)}) for i, name in enumerate(ids)
    ]
    write_jsonl(project / RESULTS, map(to_row, found))
    digest = evaluation_set.digest(file, loaded, "sealed")
    with open_run(TrackingParams(), root=project, name="sealed", stage="sealed") as run:
        evaluations.log(run, project / RESULTS, digest, pictures=Pictures([]), max_pictures=0)
        openings.record(run, digest, label)
    return digest


def test_the_sealed_part_has_the_last_word_and_is_not_opened_again(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    digest = opened(project, "tiny policy v1", share=0.3)
    opened(project, "tiny policy v2", share=0.9)
    assert cli.main(["promote", "v2"]) == 1  # the open problems show no difference
    assert cli.main(["promote", "v2", "--sealed"]) == 0
    said = capsys.readouterr().out
    assert "tiny policy v2 is champion now (before: v1)" in said
    assert "over tiny policy v1 (sealed)" in said
    store = connect(TrackingParams(), project)
    assert openings.count(store, digest) == 2
    assert cli.main(["evaluate", "--sealed"]) == 0  # of the champion
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny policy v2 on ")
    assert lines[1] == f"the sealed part {digest[:12]} was opened 2 times"
    tags = store.client.get_model_version(PARAMS.name, "2").tags
    assert "(sealed)" in tags["champion.reason"]


def test_without_a_sealed_part_nothing_is_judged_by_it(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    write_params(project)
    assert cli.main(["promote", "v2", "--sealed"]) == 2
    assert "evaluate.sealed_fraction is 0" in capsys.readouterr().err
