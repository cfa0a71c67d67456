"""A real MLflow server with accounts and a webhook: who may promote, and who is told when the champion changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from flows import alias_webhook
from polyturn.cli import commands as cli
from polyturn.params import TrackingParams
from polyturn.tracking import webhooks
from polyturn.tracking.credentials import PASSWORD, USERNAME
from polyturn.tracking.promotion import history
from polyturn.tracking.store import connect
from polyturn.tracking.webhooks import AliasMove, WebhookError, read_message, signature
from tests.toy_project import wait_until
from tests.unit.tracking.mlflow_server import MlflowServer
from tests.unit.tracking.scored import PARAMS, candidate, first_right, submit, write_params

ADMIN = ("admin", "password1234567")
TRAINER = ("trainer", "a-trainer-password")
PROMOTER = ("promoter", "a-promoter-password")
READER = ("reader", "a-reader-password")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """With basic auth, and webhooks to this machine allowed."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\n"
        f"database_uri = sqlite:///{directory}/auth.db\n"
        f"admin_username = {ADMIN[0]}\nadmin_password = {ADMIN[1]}\n"
    )
    artifacts = (directory / "artifacts").as_uri()  # straight to the store, as a team does with S3
    running = MlflowServer.on_a_free_port(directory, artifacts)
    running.options = ("--app-name", "basic-auth")
    running.environment = {
        "MLFLOW_AUTH_CONFIG_PATH": str(directory / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a secret of this test",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_CACHE_TTL": "1",
    }
    running.start()
    yield running
    running.kill()


def become(monkeypatch: pytest.MonkeyPatch, who: tuple[str, str]) -> None:
    """Let MLflow's client speak as `who`."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", who[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", who[1])


@pytest.fixture
def project(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A checkout whose params name the server; v1 and v2 were registered by the trainer."""
    from mlflow.server.auth.client import AuthServiceClient  # noqa: PLC0415 - only with accounts

    tracking = TrackingParams(uri=server.address, experiment="team")
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path, tracking={"uri": server.address, "experiment": "team"})
    become(monkeypatch, ADMIN)
    accounts = AuthServiceClient(server.address)
    for name, password in (TRAINER, PROMOTER, READER):
        accounts.create_user(name, password)
    store = connect(tracking, tmp_path)
    store.client.create_registered_model(PARAMS.name)
    for name in (TRAINER[0], PROMOTER[0]):
        accounts.grant_user_permission(name, "experiment", store.experiment_id, "EDIT")
        accounts.grant_user_permission(name, "registered_model", PARAMS.name, "MANAGE")
    become(monkeypatch, TRAINER)
    for weights, right in (("a", 20), ("b", 50)):
        registered = submit(
            tmp_path, candidate(tmp_path, weights, right / 64),
            results=first_right(right), tracking=tracking,
        )  # fmt: skip
        assert registered.alias == "challenger"
        assert "promoting takes a credential of its own on this server" in registered.reason
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(arguments)
    done = capsys.readouterr()
    return code, done.out + done.err


@pytest.mark.full  # a server with accounts hashes the password at every call: a minute
def test_promoting_takes_a_credential_of_its_own_and_tells_who_listens(
    project: Path,
    server: MlflowServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    told: list[AliasMove] = []
    receiver = alias_webhook.serve(("127.0.0.1", 0), "hush", alias="champion", react=told.append)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    tracking = TrackingParams(uri=server.address, experiment="team")
    become(monkeypatch, ADMIN)
    url = f"http://127.0.0.1:{receiver.server_address[1]}/"
    for _ in range(2):  # the second replaces the first
        webhooks.subscribe(connect(tracking, project), "polyturn", url, "hush")

    # Those who train have no say, those who read are refused by the server, and nothing moves.
    become(monkeypatch, TRAINER)
    code, said = run(capsys, "promote", "v1")
    assert code == 2
    assert f"set {USERNAME} and {PASSWORD}" in said
    monkeypatch.setenv(USERNAME, READER[0])
    monkeypatch.setenv(PASSWORD, READER[1])
    code, said = run(capsys, "promote", "--to", "v1", "--reason", "mine")
    assert code == 2
    assert "reader at" in said
    assert "Permission denied" in said or "403" in said
    become(monkeypatch, ADMIN)
    assert (
        "champion"
        not in connect(tracking, project).client.get_registered_model(PARAMS.name).aliases
    )
    assert told == []

    monkeypatch.setenv(USERNAME, PROMOTER[0])
    monkeypatch.setenv(PASSWORD, PROMOTER[1])
    become(monkeypatch, TRAINER)
    assert run(capsys, "promote", "v1")[0] == 0
    code, said = run(capsys, "promote", "v2")
    assert code == 0
    assert "tiny policy v2 is champion now (before: v1): gain +0.4688" in said
    moves = history(connect(tracking, project), PARAMS.name)
    assert [(m.alias, m.version, m.by) for m in moves if m.alias == "champion"] == [
        ("champion", 1, "promoter"),
        ("champion", 2, "promoter"),
    ]
    wait_until(lambda: len(told) == 2, seconds=20)
    assert {(move.model, move.alias, move.version) for move in told} == {
        (PARAMS.name, "champion", 1),
        (PARAMS.name, "champion", 2),
    }
    receiver.shutdown()


def message(secret: str = "hush", *, at: int = 1000, body: bytes | None = None) -> dict[str, str]:
    """Headers of a message."""
    content = BODY if body is None else body
    return {
        webhooks.DELIVERY_HEADER: "d1",
        webhooks.TIME_HEADER: str(at),
        webhooks.SIGNATURE_HEADER: signature(secret, "d1", str(at), content),
    }


BODY = (
    b'{"entity": "model_version_alias", "action": "created", '
    b'"data": {"name": "m", "alias": "champion", "version": "3"}}'
)


def test_a_signed_message_is_an_alias_move():
    assert read_message(message(), BODY, "hush", now_s=1010.0) == AliasMove(
        "m", "champion", 3, "d1"
    )


@pytest.mark.parametrize(
    ("headers", "body", "now_s", "said"),
    [
        (message("other"), BODY, 1010.0, "not signed"),
        (message(), BODY.replace(b"3", b"4"), 1010.0, "not signed"),
        (message(), BODY, 1400.0, "300 s old"),
        ({**message(), webhooks.TIME_HEADER: "soon"}, BODY, 1010.0, "says no time"),
        ({}, BODY, 1010.0, "says no time"),
        (message(body=b"{}"), b"{}", 1010.0, "no alias move"),
        (message(body=b"["), b"[", 1010.0, "no alias move"),
    ],
)
def test_what_is_not_the_servers_is_refused(
    headers: dict[str, str], body: bytes, now_s: float, said: str
):
    with pytest.raises(WebhookError, match=said):
        read_message(headers, body, "hush", now_s=now_s)
