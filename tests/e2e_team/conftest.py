"""`make test-e2e`: one team for the whole session; tests in a file run in order and build on each other's runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_team.services import MissingServiceError, Service
from tests.e2e_team.team import Team
from tests.toy_project import ToyProject


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Postgres, S3, MLflow, Prefect and the shared repository; no worker yet."""
    source = Path(__file__).resolve().parents[2]
    try:
        made = Team.start(tmp_path_factory.mktemp("team"), source)
    except MissingServiceError as missing:
        pytest.skip(f"NOT TESTED: the team's services need {missing}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def alice(team: Team) -> ToyProject:
    """Alice's checkout; the deployments are registered from it, and a worker works in it."""
    checkout = team.checkout("alice")
    team.deploy(checkout)
    team.worker(checkout)
    return checkout


@pytest.fixture(scope="session")
def bob(team: Team, alice: ToyProject) -> ToyProject:
    """Bob's checkout, as on a second host, with a worker of its own on the same pool."""
    checkout = team.checkout("bob")
    team.worker(checkout)
    return checkout


@pytest.fixture(scope="session")
def bobs_worker(team: Team, bob: ToyProject) -> Service:
    """Bob's worker."""
    return next(worker for worker in team.workers if worker.name == "bob")
