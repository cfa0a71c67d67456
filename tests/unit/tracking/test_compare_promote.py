"""`polyturn compare` and `polyturn promote` on a store with three versions: names, refusals, moves, history."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyturn.cli import commands as cli
from polyturn.params import TrackingParams
from polyturn.tracking.promotion import history
from polyturn.tracking.store import Store, connect
from tests.unit.tracking.scored import PARAMS, candidate, drawn, submit, write_params
from tests.unit.tracking.stored import stored_runs


def right(*, but: Sequence[int] = ()) -> list[list[bool]]:
    """Of 40 problems the first 20 are right, and those of `but` are the other way round."""
    return [[(i < 20) != (i in but)] for i in range(40)]


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory, template_store: Path) -> Path:
    """v1 is champion; v2 is hardly better (challenger before), v3 much better, v4 of another set."""
    root = tmp_path_factory.mktemp("registered") / "project"
    root.mkdir()
    (root / "mlflow.db").write_bytes(template_store.read_bytes())
    write_params(root, evaluate={"bootstrap_samples": 1000}, registry={"name": PARAMS.name})
    by_hand = PARAMS.model_copy(update={"promote_on_register": False})
    for weights, wrong in (("a", ()), ("b", (0, 30, 31)), ("c", tuple(range(22, 36)))):
        entry = candidate(root, weights, 0.5)
        submit(
            root,
            entry,
            PARAMS if weights == "a" else by_hand,
            results=drawn(right(but=wrong), root / "png"),
        )
    submit(root, candidate(root, "d", 0.5, "set 2"), by_hand)
    shutil.rmtree(root / "png")  # what follows has the kept pictures only
    return root


@pytest.fixture
def project(registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, moved (PIPE-07: MLflow stores absolute paths), as the working directory."""
    root = tmp_path / "moved" / "project"
    shutil.copytree(registered, root)
    hidden = registered.with_name("hidden")
    registered.rename(hidden)
    monkeypatch.chdir(root)
    yield root
    hidden.rename(registered)


def polyturn(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = cli.main(arguments)
    done = capsys.readouterr()
    return code, done.out + done.err


def store(project: Path) -> Store:
    return connect(TrackingParams(), project)


def aliases(project: Path) -> dict[str, int]:
    found = store(project).client.get_registered_model(PARAMS.name).aliases
    return {alias: int(version) for alias, version in found.items()}


def test_two_versions_of_a_moved_project_are_compared_on_a_page_with_pictures(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    code, said = polyturn(capsys, "compare", "v1", "v3", "--problems", "5")
    assert code == 0
    assert "tiny policy v3 is better than tiny policy v1" in said
    assert "sampled  40        0.500 [" in said
    assert "+0.350 [" in said
    page = (project / "runs/compare.html").read_text()
    assert page.count('src="data:image/png;base64,') == 5
    assert "14 problems that tiny policy v3 solves better, 0 that tiny policy v1 does" in page
    assert "Answer: \\boxed{" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    (run,) = [run for run in stored_runs(project) if run.data.tags.get("stage") == "compare"]
    assert run.data.metrics["gain"] == pytest.approx(0.35)


def test_every_name_of_a_policy_leads_to_it(project: Path, capsys: pytest.CaptureFixture[str]):
    held = store(project).client.get_model_version(PARAMS.name, "1").tags["evaluation.run_id"]
    for name in (
        "v1",
        "1",
        "champion",
        f"{PARAMS.name}@champion",
        f"models:/{PARAMS.name}/1",
        held,
    ):
        code, said = polyturn(capsys, "compare", name, "v3", "--markdown")
        assert code == 0, said
        assert "+0.350 [" in said
        assert "## tiny policy v3 against" in said
    # v1 with v2 and v1 with v3, whatever v1 was called.
    assert "2 pairs were compared" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9", "'v9' is no version, alias or run"),
        ("best", "'best' is no version, alias or run"),
        ("other/1", "(model 'other'"),
        ("other/1", "models there: tiny policy"),
        ("0" * 32, "has no run 0000"),
        ("v1", "'champion' and 'v1' are one policy"),
        ("v4", "tiny policy v1 was scored on evaluation set set 1, tiny policy v4 on set 2"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
):
    code, said = polyturn(capsys, "compare", "champion", name)
    assert code == 2
    assert said.startswith("error: ")
    assert message in said
    assert not (project / "runs").exists()


def test_the_champion_moves_only_when_the_rule_says_so_and_both_verdicts_are_recorded(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    code, said = polyturn(capsys, "promote", "v2")
    assert code == 1
    assert "does not exceed registry.min_gain 0" in said
    assert "promote --to v2 --reason" in said
    assert aliases(project)["champion"] == 1
    assert aliases(project)["challenger"] == 2
    code, said = polyturn(capsys, "promote", "v3")
    assert code == 0
    assert "tiny policy v3 is champion now (before: v1): gain +0.3500 [+0." in said
    assert aliases(project) == {"champion": 3, "challenger": 2}
    tags = store(project).client.get_model_version(PARAMS.name, "3").tags
    assert tags["champion.reason"].startswith("gain +0.3500")
    assert (
        "comparison 3 on this set" not in said
    )  # v1-v2 and v1-v3 were counted when they registered
    assert "(comparison 2 on this set)" in tags["champion.reason"]
    assert tags["champion.by"]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d", tags["champion.at"])
    again = polyturn(capsys, "promote", "champion")
    assert again[0] == 0
    assert "tiny policy v3 is champion already: gain +0.3500" in again[1]


def test_the_challenger_is_the_default_and_min_gain_stands_in_its_way(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    assert polyturn(capsys, "promote", "v4")[0] == 1  # scored on another set: challenger
    write_params(project, registry={"name": PARAMS.name, "min_gain": 0.3})
    code, said = polyturn(capsys, "promote", "v3")
    assert code == 1
    assert "does not exceed registry.min_gain 0.3" in said
    assert aliases(project) == {"champion": 1, "challenger": 3}
    write_params(project, registry={"name": PARAMS.name})
    assert polyturn(capsys, "promote")[0] == 0
    assert aliases(project) == {"champion": 3}


def test_a_rollback_needs_a_reason_and_every_move_is_kept(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    assert polyturn(capsys, "promote", "v3")[0] == 0
    code, said = polyturn(capsys, "promote", "--to", "v1")
    assert code == 2
    assert "--reason TEXT" in said
    code, said = polyturn(capsys, "promote", "--to", "v1", "--reason", "v3 loops on circles")
    assert (code, said.strip()) == (
        0,
        "tiny policy v1 is champion now (before: v3): by hand: v3 loops on circles",
    )
    assert aliases(project)["champion"] == 1
    code, said = polyturn(capsys, "promote", "--history")
    lines = said.splitlines()
    assert code == 0
    moves = [line for line in lines if "champion " in line and "->" in line]
    assert [re.findall(r"(none|v\d+) -> (v\d+)", line)[0] for line in moves] == [
        ("none", "v1"), ("v1", "v3"), ("v3", "v1"),
    ]  # fmt: skip
    assert moves[-1].endswith("by hand: v3 loops on circles")
    assert lines[-1] == "champion of tiny policy is v1"
    assert all(move.by and move.reason for move in history(store(project), PARAMS.name))


def test_a_move_by_other_means_is_told(project: Path, capsys: pytest.CaptureFixture[str]):
    store(project).client.set_registered_model_alias(PARAMS.name, "champion", "2")
    said = polyturn(capsys, "promote", "--history")[1]
    assert said.splitlines()[-2:] == [
        "champion of tiny policy is v2",
        "it was moved last by other means than polyturn: the history does not say why",
    ]


def test_a_candidate_and_a_version_by_hand_exclude_each_other(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    code, said = polyturn(capsys, "promote", "v2", "--to", "v3", "--reason", "x")
    assert code == 2
    assert "takes a candidate for the rule, or --to" in said


@pytest.mark.parametrize("value", ["{}", "[]", "moved by hand", '{"version": "x"}'])
def test_a_history_tag_of_somebody_else_is_named_and_left_out(
    project: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, value: str
):
    # Tags of a registered model are anybody's to set, in MLflow's page too.
    before = history(store(project), PARAMS.name)
    store(project).client.set_registered_model_tag(PARAMS.name, "history.2026", value)
    code, said = polyturn(capsys, "promote", "--history")
    assert code == 0, said
    assert history(store(project), PARAMS.name) == before
    assert "tag history.2026 is no move of an alias" in caplog.text + said


@pytest.mark.parametrize("run_id", ["0" * 32, "v1", "a b", ""])
def test_a_run_that_is_not_there_cannot_be_pinned(
    project: Path, capsys: pytest.CaptureFixture[str], run_id: str
):
    # It said that the server had stopped answering.
    code, said = polyturn(capsys, "pin", run_id)
    assert code == 2
    assert f"has no run {run_id!r}" in said
