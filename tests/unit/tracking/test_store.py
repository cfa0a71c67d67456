"""Addresses and the connection: worktrees, races, moves, servers and buckets that do not answer.

PIPE-05 (two first users), PIPE-07 (project moved), PIPE-10 (bucket without credentials), PIPE-12 (half of them).
"""

import errno
import fcntl
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from sqlalchemy import event
from sqlalchemy.engine import Engine

from polyturn import layout
from polyturn.objects import Objects, ObjectsError
from polyturn.params import Params, RegistryParams, TrackingParams
from polyturn.pictures import Pictures
from polyturn.report.data import read_run
from polyturn.tracking import TrackingError, open_run
from polyturn.tracking.fetch_model import fetch_model
from polyturn.tracking.run import attach_run
from polyturn.tracking.store import SilentServerError, connect, resolve
from polyturn.tracking.traces import log_trajectories
from tests.unit.fake_run import make_run
from tests.unit.tracking.scored import candidate, submit


def test_worktrees_share_the_main_checkouts_store(tmp_path: Path):
    main, linked = tmp_path / "main", tmp_path / "linked"
    main.mkdir()
    commit = [
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.org",
        "commit",
        "-q",
        "--allow-empty",
    ]
    for command in (["init", "-q"], [*commit, "-m", "x"], ["worktree", "add", "-q", str(linked)]):
        subprocess.run(["git", *command], cwd=main, check=True, capture_output=True)
    here, there = resolve(TrackingParams(), main), resolve(TrackingParams(), linked)
    assert here == there
    assert here.uri == f"sqlite:///{main}/mlflow.db"
    assert here.artifacts == f"file://{main}/mlartifacts"


def test_addresses_of_the_environment_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYTURN_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    monkeypatch.setenv("POLYTURN_ARTIFACT_LOCATION", "s3://bucket/x")
    addresses = resolve(TrackingParams(), tmp_path / "elsewhere")
    assert addresses.uri == f"sqlite:///{tmp_path}/other.db"
    assert addresses.artifacts == "s3://bucket/x"


def test_a_login_in_the_address_is_used_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """zenml-io/zenml#2443, mlflow/mlflow#25874: http://name:password@host works, and every log line and link tells the password."""
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "before")  # put back at the end
        monkeypatch.delenv(name)
    found = resolve(TrackingParams(uri="https://ada:p%40ss@host.example:5000/mlflow/"), tmp_path)
    assert found.uri == "https://host.example:5000/mlflow"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "ada"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "p@ss"
    resolve(TrackingParams(uri="https://eve:other@host.example"), tmp_path)
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "ada", "what is set goes first: a promoter's"
    with pytest.raises(TrackingError) as caught:
        connect(TrackingParams(uri="http://ada:secret@127.0.0.1:9", timeout_s=2), tmp_path)
    assert "secret" not in str(caught.value)


def test_an_address_for_mlflow_itself_is_ignored_with_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9/")
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with open_run(TrackingParams(system_metrics_s=0), root=project, name="train") as run:
        run.log_metrics({"loss": 1.0}, 1)
    assert run.store.client.get_run(run.run_id).data.metrics == {"loss": 1.0}
    assert "MLFLOW_TRACKING_URI is ignored: runs go to tracking.uri sqlite:///" in caplog.text
    assert "POLYTURN_TRACKING_URI goes before it" in caplog.text


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in every other path of params.yaml; else a directory of that name is made in the checkout."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    params = TrackingParams(uri="sqlite:///~/all/mlflow.db", artifact_location="~/artifacts")
    addresses = resolve(params, tmp_path / "checkout")
    assert addresses.database == tmp_path / "home" / "all" / "mlflow.db"
    assert addresses.artifacts == (tmp_path / "home" / "artifacts").as_uri()


def test_an_absolute_sqlite_path_and_a_relative_artifact_path_are_understood(tmp_path: Path):
    params = TrackingParams(uri=f"sqlite:///{tmp_path}/a/b.db", artifact_location="store")
    addresses = resolve(params, tmp_path)
    assert addresses.database == tmp_path / "a/b.db"
    assert addresses.artifacts == f"file://{tmp_path}/store"


@pytest.mark.parametrize("uri", ["mlruns", "postgresql://host/db", "ftp://host", ""])
def test_another_kind_of_uri_is_refused(tmp_path: Path, uri: str):
    with pytest.raises(TrackingError, match=r"tracking\.uri must be sqlite"):
        resolve(TrackingParams(uri=uri), tmp_path)


RACER = """
import sys
from pathlib import Path
from polyturn.params import TrackingParams
from polyturn.tracking import open_run
sys.stdin.readline()
with open_run(TrackingParams(), root=Path(sys.argv[1]), name="racer") as run:
    run.log_metrics({"a": 1.0}, 1)
"""


def test_two_processes_may_use_a_fresh_database_at_once(tmp_path: Path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        _, errors = racer.communicate(timeout=300)
        assert racer.returncode == 0, errors
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'polyturn'")
    assert len(client.search_runs([experiment.experiment_id])) == 2


def test_a_moved_project_finds_its_artifacts(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Files of runs, a registered model, and the pictures of traces."""
    trained = make_run(tmp_path / "trained")
    pictures = Pictures([trained / layout.TRAJECTORIES / "png", trained / layout.IMAGES / "png"])
    with open_run(TrackingParams(), root=project, name="train") as old:
        old.log_text("hello", "note.txt")
        log_trajectories(old, [(read_run(trained).exhibits.after[0], "policy")], pictures.data_uri)
    submit(project, candidate(project, "a", 0.5))
    moved = project.with_name("moved")
    shutil.move(project, moved)
    with open_run(TrackingParams(), root=moved, name="evaluate") as run:
        pass
    assert f"moved from {project}/mlartifacts to {moved}/mlartifacts" in caplog.text
    uri = f"sqlite:///{moved}/mlflow.db"
    for run_id, name in ((old.run_id, "note.txt"), (run.run_id, "environment")):
        assert Path(
            download_artifacts(run_id=run_id, artifact_path=name, tracking_uri=uri)
        ).exists()
    assert run.artifact_uri.startswith(f"file://{moved}/")
    chosen = Params(registry=RegistryParams(name="tiny policy"))
    assert fetch_model("champion", tmp_path / "got", chosen, moved).is_dir()
    (trace,) = run.store.client.search_traces(
        locations=[run.store.experiment_id], run_id=old.run_id
    )
    place = trace.info.tags["mlflow.artifactLocation"].removeprefix("file://")
    assert list(Path(place).rglob("*")), place
    assert place.startswith(str(moved))


@pytest.mark.parametrize("number", [2, 4])
def test_first_users_of_an_experiment_on_a_server_race(
    project: Path, number: int, monkeypatch: pytest.MonkeyPatch
):
    """PIPE-05 where no file lock holds others off: each asks, finds none, and makes one."""
    asked = threading.Barrier(number, timeout=30)
    find = MlflowClient.get_experiment_by_name
    seen = threading.local()

    def together(client: MlflowClient, name: str):
        found = find(client, name)
        if not getattr(seen, "waited", False):
            seen.waited = True
            asked.wait()
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", together)
    monkeypatch.setattr("polyturn.tracking.store.store_lock", lambda _: nullcontext())
    with ThreadPoolExecutor(number) as pool:
        chosen = TrackingParams(experiment="fresh")
        stores = list(pool.map(lambda _: connect(chosen, project), range(number)))
    assert len({store.experiment_id for store in stores}) == 1


def test_a_deleted_experiment_is_named(project: Path):
    store = connect(TrackingParams(), project)
    store.client.delete_experiment(store.experiment_id)
    with pytest.raises(TrackingError, match=r"tracking\.experiment 'polyturn' was deleted"):
        connect(TrackingParams(), project)


def test_another_artifact_location_is_said_to_be_ignored(
    project: Path, caplog: pytest.LogCaptureFixture
):
    connect(TrackingParams(), project)
    connect(TrackingParams(artifact_location="elsewhere"), project)
    assert "tracking.artifact_location" in caplog.text
    assert "is ignored" in caplog.text


def test_a_file_that_is_no_database_is_named(tmp_path: Path):
    (tmp_path / "mlflow.db").write_text(
        "this is no database, but long enough to be looked at\n" * 9
    )
    with pytest.raises(TrackingError, match=r"tracking\.uri 'sqlite:///.*cannot be used"):
        connect(TrackingParams(), tmp_path)


@pytest.fixture
def short_patience() -> Iterator[None]:
    """MLflow waits 20 s for a locked SQLite file; here 0.2 s."""

    def shorten(conn, cursor, statement, parameters, context, executemany):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 200"), parameters

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)


@contextmanager
def locked(database: Path) -> Iterator[None]:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("COMMIT")


@pytest.mark.usefixtures("short_patience")
def test_a_locked_database_is_waited_for_and_costs_no_step(project: Path):
    """mlflow/mlflow#6490: `database is locked`, by a backup, a viewer or another run."""
    with open_run(TrackingParams(system_metrics_s=0), root=project, name="train") as run:
        with locked(project / "mlflow.db"):
            for step in (1, 2):
                run.log_metrics({"loss": 1 / step}, step)
            assert run.outbox.is_waiting
            with pytest.raises(SilentServerError, match="database is locked"):
                connect(TrackingParams(), project)
        assert run.outbox.wait(10)
    history = run.store.client.get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]
    assert run.store.client.get_run(run.run_id).info.status == "FINISHED"


def test_a_place_without_file_locks_is_named(project: Path, monkeypatch: pytest.MonkeyPatch):
    """A network file system without a lock daemon: `No locks available`."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TrackingError, match=r"No locks available.*a path on a local disk"):
        connect(TrackingParams(), project)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_database_of_another_mlflow_is_named(project: Path, is_whole: bool):
    """mlflow/mlflow#12627, #16517: `Can't locate revision identified by ...`."""
    path = project / "mlflow.db"
    if not is_whole:
        path.unlink()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32))")
        database.execute("DELETE FROM alembic_version")
        database.execute("INSERT INTO alembic_version VALUES ('ffff00000000')")
    said = "out-of-date database schema" if is_whole else "written by another version of MLflow"
    with pytest.raises(TrackingError, match=said):
        connect(TrackingParams(), project)


def test_a_run_that_somebody_deletes_is_named_as_such(project: Path):
    store = connect(TrackingParams(), project)
    created = store.client.create_run(store.experiment_id)
    run = attach_run(TrackingParams(), root=project, run_id=created.info.run_id)
    store.client.delete_run(run.run_id)
    with pytest.raises(TrackingError, match="it was deleted there meanwhile; start it again"):
        run.log_metrics({"loss": 1.0}, 1)


def test_an_unwritable_place_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"tracking\.uri .* cannot be written"):
        connect(TrackingParams(uri="sqlite:///file/mlflow.db"), tmp_path)


@contextmanager
def answering(status: int, wait_s: float = 0.0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            time.sleep(wait_s)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"Invalid Host header")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_server_that_is_not_there_is_named_at_once(tmp_path: Path):
    started = time.monotonic()
    uri = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackingError, match=rf"tracking\.uri '{uri}' does not answer.*sqlite"):
        connect(TrackingParams(uri=uri), tmp_path)
    assert time.monotonic() - started < 5


def test_a_server_that_hangs_is_given_up_after_the_timeout(tmp_path: Path):
    with answering(200, wait_s=3) as uri:
        started = time.monotonic()
        with pytest.raises(TrackingError, match=r"within tracking\.timeout_s 0\.5"):
            connect(TrackingParams(uri=uri, timeout_s=0.5), tmp_path)
        assert time.monotonic() - started < 2.5


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_a_server_that_refuses_is_named_with_its_answer(tmp_path: Path, status: int):
    refused = pytest.raises(TrackingError, match=rf"answers {status} .*allowed-hosts")
    with answering(status) as uri, refused:
        connect(TrackingParams(uri=uri), tmp_path)


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    return monkeypatch


BUCKET = TrackingParams(artifact_location="s3://bucket/x", timeout_s=2)


def test_a_bucket_without_credentials_fails_before_work_starts(
    tmp_path: Path, no_aws: pytest.MonkeyPatch
):
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"s3://bucket/x' has no credentials: set AWS_ACCESS"):
        connect(BUCKET, tmp_path)
    assert time.monotonic() - started < 5


def test_a_bucket_that_only_the_experiment_names_is_checked_too(
    project: Path, no_aws: pytest.MonkeyPatch
):
    """PIPE-10: params name no bucket, but runs of the experiment go to one."""
    store = connect(TrackingParams(), project)
    store.client.create_experiment("in a bucket", "s3://bucket/x")
    with pytest.raises(TrackingError, match=r"s3://bucket/x' has no credentials"):
        connect(TrackingParams(experiment="in a bucket", timeout_s=2), project)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_half_a_pair_of_keys_names_the_other_half(
    tmp_path: Path, no_aws: pytest.MonkeyPatch, given: str, missing: str
):
    no_aws.setenv(given, "x")
    with pytest.raises(TrackingError, match=f"{missing} is not set"):
        connect(BUCKET, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_PROFILE", "no-such"), ("AWS_CONFIG_FILE", "cut")]
)
def test_aws_settings_that_cannot_be_used_are_one_line(
    tmp_path: Path, no_aws: pytest.MonkeyPatch, name: str, value: str
):
    """jorgebastida/awslogs#352: ProfileNotFound, a profile of the user's shell that this machine does not know."""
    (tmp_path / "cut").write_text("[default")
    no_aws.setenv(name, str(tmp_path / value) if name == "AWS_CONFIG_FILE" else value)
    with pytest.raises(TrackingError, match=r"tracking\.artifact_location .*check AWS_PROFILE"):
        connect(BUCKET, tmp_path)
    with pytest.raises(ObjectsError, match="check AWS_PROFILE"):
        Objects("s3://team/x", endpoint_url=None)


def test_half_a_pair_of_keys_does_not_touch_local_runs(project: Path, no_aws: pytest.MonkeyPatch):
    no_aws.setenv("AWS_ACCESS_KEY_ID", "x")
    with open_run(TrackingParams(), root=project, name="train") as run:
        assert run.run_id


def test_a_dead_bucket_address_is_named_within_seconds(tmp_path: Path, no_aws: pytest.MonkeyPatch):
    no_aws.setenv("AWS_ACCESS_KEY_ID", "x")
    no_aws.setenv("AWS_SECRET_ACCESS_KEY", "y")
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"cannot be written .*MLFLOW_S3_ENDPOINT_URL \(http"):
        connect(BUCKET, tmp_path)
    assert time.monotonic() - started < 8
