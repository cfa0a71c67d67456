"""`make test-e2e`: one team for the whole session; tests in a file run in order and build on each other's runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e_team.services import MissingServiceError
from tests.e2e_team.team import Team
from tests.toy_project import ToyProject, wait_until


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


@dataclass
class Inbox:
    """Where notifications arrive: what was posted, as JSON."""

    url: str
    posted: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def wait_for(self, text: str) -> dict[str, str]:
        """The first message with `text` in its subject."""

        def found() -> list[dict[str, str]]:
            return [message for message in self.posted if text in message["subject"]]

        wait_until(lambda: bool(found()), seconds=60)
        return found()[0]


@pytest.fixture(scope="session")
def inbox() -> Iterator[Inbox]:
    """A loopback server that takes notifications."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            made.posted.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        made = Inbox(f"http://127.0.0.1:{server.server_port}/")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture(scope="session")
def alice(team: Team) -> ToyProject:
    """Alice's checkout; the deployments are registered from it, and a worker works in it."""
    checkout = team.checkout("alice")
    team.deploy(checkout)
    team.worker(checkout)
    return checkout


@pytest.fixture(scope="session")
def bob(team: Team, alice: ToyProject) -> ToyProject:
    """Bob's checkout, as on a second host, with a worker of its own on the same pool; each takes one run at a time."""
    checkout = team.checkout("bob")
    team.worker(checkout)
    return checkout
