"""Two runs of one team: compared, promoted, rolled back, and the first one reproduced from its id on another host."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import pytest

from tests.e2e_team.team import Team
from tests.toy_project import ToyProject

pytestmark = pytest.mark.slow(minutes=4)
STAGES = ("fetch", "images", "model", "warmstart", "train", "evaluate", "register")
MODEL = "polyturn-tiny"
SEED = 21  # no other test's: the two runs are scored on one set, which no other run is


@pytest.fixture(scope="module")
def versions(team: Team, alice: ToyProject) -> dict[str, int]:
    """Registry versions of two pipeline runs, by flow run name; the second gains from entropy, so that it gets weights of
    its own though the tiny recipe earns no reward."""
    second = {"learner.lr": 1e-3, "loss.entropy_coef": 0.1}
    asked = {
        name: team.submit(
            "pipeline/cpu-demo", name, owner="alice", overrides={"seed": SEED, **changes}
        )
        for name, changes in (("reg-1", {}), ("reg-2", second))
    }
    for run_id in asked.values():
        ended = team.wait(run_id)
        assert ended.state == "COMPLETED", team.logs(run_id)
    found = {name: team.mlflow_runs(name)["register"]["tags"]["registered"] for name in asked}
    return {name: int(uri.rpartition("/")[2]) for name, uri in found.items()}


def polyturn(team: Team, host: ToyProject, *arguments: str) -> tuple[int, str]:
    done = host.run(sys.executable, "-m", "polyturn.cli", *arguments, **team.env)
    return done.returncode, done.stdout


def aliases(team: Team) -> dict[str, Any]:
    address = f"{team.mlflow_url}/api/2.0/mlflow/registered-models/get"
    model = httpx.get(address, params={"name": MODEL}, timeout=30).json()["registered_model"]
    return {alias["alias"]: int(alias["version"]) for alias in model.get("aliases", ())}


def test_the_two_are_compared_on_one_set_from_a_clone_that_ran_neither(
    team: Team, versions: dict[str, int]
) -> None:
    first, second = (f"v{number}" for number in versions.values())
    host = team.checkout("carol")
    code, said = polyturn(team, host, "compare", first, second, "--markdown")
    assert code == 0, said
    assert f"## {MODEL} {second} against {MODEL} {first}" in said
    assert first != second
    assert "| sampled | 16 | 0." in said
    assert "| learner.lr | 0.0003 | 0.001 |" in said
    assert "<svg" in (host.path / "runs/compare.html").read_text()


def test_a_deployment_compares_them_with_a_table_on_its_page(
    team: Team, alice: ToyProject, versions: dict[str, int]
) -> None:
    names = [f"{MODEL}/{number}" for number in versions.values()]
    run_id = team.submit("compare/versions", "reg-compare", first=names[0], second=names[1])
    assert team.wait(run_id).state == "COMPLETED", team.logs(run_id)
    table = json.loads(team.artifacts(run_id)["comparison"])
    assert [row["score or kind"] for row in table][:2] == ["sampled", "greedy"]


def test_promotion_is_by_rule_or_with_a_reason_and_can_be_taken_back(
    team: Team, alice: ToyProject, versions: dict[str, int]
) -> None:
    first, second = versions.values()
    assert polyturn(team, alice, "promote", "--to", f"v{first}", "--reason", "baseline")[0] == 0
    code, said = polyturn(team, alice, "promote", f"v{second}")
    assert (code == 0) == (aliases(team)["champion"] == second)
    assert "registry.min_gain 0" in said
    code, said = polyturn(team, alice, "promote", "--to", f"v{second}", "--reason", "a trial")
    assert code == 0, said
    assert aliases(team)["champion"] == second
    code, said = polyturn(team, alice, "promote", "--to", f"v{first}", "--reason", "worse live")
    assert f"v{first} is champion now (before: v{second}): by hand: worse live" in said
    assert aliases(team)["champion"] == first
    history = polyturn(team, alice, "promote", "--history")[1]
    assert "by hand: a trial" in history
    assert history.splitlines()[-1] == f"champion of {MODEL} is v{first}"


def test_the_first_run_is_reproduced_from_its_id_on_another_host_and_every_stage_ran(
    team: Team, versions: dict[str, int]
) -> None:
    run_id = team.mlflow_runs("reg-1")["pipeline"]["id"]
    host = team.checkout("dave")
    before = aliases(team)
    code, said = polyturn(team, host, "reproduce", run_id)
    assert code == 0, said
    assert "Reproduced: all" in said
    log = (host.path / "runs" / f"reproduce-{run_id[:8]}" / "log.txt").read_text()
    for stage in STAGES:
        assert f"Running stage '{stage}'" in log
        assert f"| {stage} | yes |" in said
    assert "| train | weights.sha256 |" in said
    assert "DIFFERS" not in said
    assert aliases(team) == before  # reproducing registers nothing
