"""Two users, two workers, one set of services: runs at once, ended by stop, cancel and death, and gone on with."""

from __future__ import annotations

from tests.e2e_team.team import Team
from tests.toy_project import ToyProject


def test_two_users_runs_at_the_same_time(team: Team, alice: ToyProject, bob: ToyProject) -> None:
    runs = {
        owner: team.submit("pipeline/cpu-demo", f"{owner}-1", owner=owner, overrides=overrides)
        for owner, overrides in (("alice", {"seed": 1}), ("bob", {"seed": 2, "learner.lr": 1e-5}))
    }
    ended = {owner: team.wait(run_id) for owner, run_id in runs.items()}
    for owner, run in ended.items():
        assert run.state == "COMPLETED", team.logs(run.id)
        print(team.mlflow_runs(f"{owner}-1"))
        print(team.artifacts(run.id))
        print(run)
