"""Objects, leases and snapshots against a real S3 server on loopback."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

import pytest

from polyturn import processes
from polyturn.objects import ChangedError, Objects, ObjectsError, UnreachableError
from polyturn.pipeline import object_lease
from polyturn.pipeline.lease import LeaseError
from polyturn.pipeline.object_lease import Holder, ObjectLease
from polyturn.training.snapshots import Snapshots
from tests import s3


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with the bucket `team`."""
    with s3.serving("team") as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment."""
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def objects(server: str, credentials: None) -> Objects:
    """An empty prefix of the bucket."""
    return Objects(f"s3://team/{uuid4().hex}", endpoint_url=server)


# -- objects --------------------------------------------------------------------------------------------------


def test_conditional_writes_succeed_on_the_version_that_was_read_alone(objects: Objects) -> None:
    assert objects.get("a") is None
    first = objects.put_new("a", b"1")
    with pytest.raises(ChangedError):
        objects.put_new("a", b"2")
    second = objects.put_over("a", b"2", first)
    with pytest.raises(ChangedError):
        objects.put_over("a", b"3", first)
    with pytest.raises(ChangedError):
        objects.put_over("none", b"3", first)
    with pytest.raises(ChangedError):
        objects.delete("a", only=first)
    stored = objects.get("a")
    assert stored is not None
    assert (stored.data, stored.etag) == (b"2", second)
    assert 0 <= stored.age_s < 30
    objects.delete("a", only=second)
    objects.delete("a")
    assert objects.get("a") is None


def test_names_are_those_below_the_prefix(server: str, objects: Objects) -> None:
    for name in ("b/2", "b/1", "a"):
        objects.put(name, b"")
    Objects(objects.address + "x", endpoint_url=server).put("other", b"")
    assert objects.names() == ["a", "b/1", "b/2"]
    assert objects.names("b/") == ["b/1", "b/2"]
    whole = Objects("s3://team", endpoint_url=server)
    assert f"{objects.address.rsplit('/', 1)[1]}/a" in whole.names()


def test_an_absent_file_is_not_downloaded(objects: Objects, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        objects.download("none", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "work",
    [
        lambda o: o.get("x"),
        lambda o: o.put("x", b""),
        lambda o: o.names(),
        lambda o: o.upload("x", Path(__file__)),
    ],
    ids=["get", "put", "names", "upload"],
)
def test_a_bucket_that_is_not_there_is_the_users_to_mend(
    server: str, credentials: None, work: Callable[[Objects], object]
) -> None:
    with pytest.raises(ObjectsError, match=r"s3://nowhere/x: .*NoSuchBucket; check the bucket"):
        work(Objects("s3://nowhere/x", endpoint_url=server))


def test_a_server_that_does_not_answer_may_do_so_later(credentials: None) -> None:
    with pytest.raises(UnreachableError, match=r"127.0.0.1:9 cannot be reached.*storage.endpoint"):
        Objects("s3://team/x", endpoint_url="http://127.0.0.1:9", attempts=1).get("x")


@pytest.mark.parametrize("there", sorted(s3.CREDENTIALS.keys() - {"AWS_DEFAULT_REGION"}))
def test_half_a_pair_of_keys_is_named(
    credentials: None, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """PIPE-12."""
    for name in s3.CREDENTIALS:
        if name != there:
            monkeypatch.delenv(name)
    (missing,) = s3.CREDENTIALS.keys() - {there, "AWS_DEFAULT_REGION"}
    with pytest.raises(ObjectsError, match=f"{missing} is not set"):
        Objects("s3://team/x", endpoint_url=None)


def test_no_credentials_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PIPE-10: without a wait for an instance's metadata address."""
    for name in s3.CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    started = time.monotonic()
    with pytest.raises(ObjectsError, match="has no credentials: set AWS_ACCESS_KEY_ID"):
        Objects("s3://team/x", endpoint_url=None)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("address", ["s3:///x", "http://team/x", "team/x"])
def test_an_address_without_a_bucket_is_refused(credentials: None, address: str) -> None:
    with pytest.raises(ObjectsError, match="is no s3://BUCKET/PREFIX"):
        Objects(address, endpoint_url=None)


# -- leases ---------------------------------------------------------------------------------------------------


def lease(
    objects: Objects, *, seconds: float = 1.0, on_loss: Callable[[], None] = lambda: None
) -> ObjectLease:
    return ObjectLease(objects, "lease.json", seconds=seconds, on_loss=on_loss)


def stranger(objects: Objects, **changes: object) -> Holder:
    """The lease of a process on another machine, which never renews it."""
    holder = Holder("other", "elsewhere", "elsewhere/boot/pid:[1]", "77:88", 1.0)
    holder = replace(holder, **changes)
    objects.put("lease.json", json.dumps(asdict(holder)).encode())
    return holder


def test_a_lease_is_renewed_while_it_is_held_and_removed_at_the_end(objects: Objects) -> None:
    mine = lease(objects, seconds=0.6)
    mine.acquire("run x")
    first = objects.get("lease.json")
    time.sleep(1.5)
    later = objects.get("lease.json")
    assert first is not None
    assert later is not None
    assert json.loads(later.data)["beat"] >= 2
    mine.check()
    mine.release()
    assert objects.get("lease.json") is None


def test_a_second_process_is_told_who_works_there(objects: Objects) -> None:
    mine = lease(objects)
    mine.acquire("run x")
    try:
        with pytest.raises(
            LeaseError, match=r"run x is already running as pid \d+ on .*, which renewed"
        ):
            lease(objects).acquire("run x")
    finally:
        mine.release()


def test_a_silent_holder_is_waited_for_and_then_replaced_with_a_warning(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    stranger(objects, seconds=1.5)
    caplog.set_level(logging.INFO)
    started = time.monotonic()
    mine = lease(objects)
    mine.acquire("run x")
    mine.release()
    assert 0.4 < time.monotonic() - started < 5  # the store tells ages in whole seconds
    assert "run x: pid 77 on elsewhere holds the lease" in caplog.text
    assert "run x: the lease of pid 77 on elsewhere, who is silent, is taken over" in caplog.text


def test_a_dead_process_of_this_machine_is_not_waited_for(objects: Objects) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = processes.find(child.pid)
    child.kill()
    child.communicate()
    stranger(objects, machine=object_lease._machine(), process=str(process), seconds=300.0)
    mine = lease(objects)
    started = time.monotonic()
    mine.acquire("run x")
    mine.release()
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"token": 3'])
def test_a_lease_that_nobody_signed_is_taken_over_after_its_time(
    objects: Objects, content: bytes
) -> None:
    objects.put("lease.json", content)
    mine = lease(objects, seconds=0.5)
    mine.acquire("run x")
    mine.release()


def test_of_many_that_start_at_once_one_wins(objects: Objects) -> None:
    stranger(objects, seconds=0.5)
    won: list[ObjectLease] = []
    lost: list[str] = []

    def attempt() -> None:
        mine = lease(objects, seconds=1.5)
        try:
            mine.acquire("run x")
        except LeaseError as error:
            lost.append(str(error))
        else:
            won.append(mine)

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)
    won[0].release()


def test_a_holder_whose_lease_was_taken_learns_it_and_may_not_publish(objects: Objects) -> None:
    is_told = threading.Event()
    mine = lease(objects, seconds=0.6, on_loss=is_told.set)
    mine.acquire("run x")
    stranger(objects)
    assert is_told.wait(5)
    with pytest.raises(
        LeaseError, match="was taken over by pid 77 on elsewhere, as this process had"
    ):
        mine.check()
    mine.release()
    assert objects.get("lease.json") is not None, "it is the other one's"


def test_a_store_that_is_away_for_a_while_does_not_cost_the_lease(
    credentials: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, may not publish, and publishes when the store is back."""
    with s3.serving("team") as url:
        port = int(url.rsplit(":", 1)[1])
        mine = lease(Objects("s3://team/run", endpoint_url=url, attempts=1), seconds=0.6)
        mine.acquire("run x")
    time.sleep(1.0)
    with pytest.raises(UnreachableError):
        mine.check()
    assert "the lease cannot be renewed now" in caplog.text
    with s3.serving("team", port=port):
        mine.check()
        mine.release()


# -- snapshots ------------------------------------------------------------------------------------------------


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_newest_snapshot_comes_back_as_it_was_and_replaces_what_is_there(
    objects: Objects, tmp_path: Path
) -> None:
    snapshots = Snapshots(objects, keep=2)
    assert snapshots.latest() is None
    assert snapshots.pull(tmp_path / "out") is None
    snapshots.push(1, write(tmp_path / "one", a="1", sub__b="x"))
    snapshots.push(2, write(tmp_path / "two", a="2", sub__b="x", sub__c=""))
    write(tmp_path / "out", old="old")
    assert Snapshots(objects, keep=2).latest() == 2
    assert Snapshots(objects, keep=2).pull(tmp_path / "out") == 2
    assert contents(tmp_path / "out") == {"a": "2", "sub/b": "x", "sub/c": ""}


def test_shared_files_are_stored_once_and_only_what_is_needed_stays(
    objects: Objects, tmp_path: Path
) -> None:
    snapshots = Snapshots(objects, keep=2)
    for step in range(1, 5):
        snapshots.push(step, write(tmp_path / "work", same="s", file=str(step)))
    assert [name for name in objects.names() if name.startswith("snapshot")] == [
        "snapshot_000003.json",
        "snapshot_000004.json",
    ]
    assert len(objects.names("blobs/")) == 3  # "s", "3", "4"
    objects.put("lease.json", b"")
    snapshots.remove()
    assert objects.names() == ["lease.json"]


@pytest.mark.parametrize("keep", [1, 2])
def test_snapshots_of_a_run_that_was_given_up_do_not_push_out_the_first_ones_of_another(
    objects: Objects, tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers #37260, on a store of objects: the same steps go as of checkpoints on a disk."""
    given_up = Snapshots(objects, keep=3)
    for step in (500, 600, 700):
        given_up.push(step, write(tmp_path / "work", file=str(step)))
    snapshots = Snapshots(objects, keep=keep)
    snapshots.push(100, write(tmp_path / "work", file="100"))
    assert snapshots.latest() == 100
    assert "snapshot of step 700" in caplog.text
    assert "is removed: the run is at step 100 only" in caplog.text
    assert len(objects.names("blobs/")) == 1, "the files of the others go with them"
    snapshots.push(200, write(tmp_path / "work", file="200"))
    assert snapshots.pull(tmp_path / "out") == 200
    assert contents(tmp_path / "out") == {"file": "200"}
    assert [name for name in objects.names() if name.startswith("snapshot")] == [
        f"snapshot_000{step}.json" for step in (100, 200)[-keep:]
    ]


def test_a_snapshot_is_whole_or_does_not_exist(objects: Objects, tmp_path: Path) -> None:
    """The object that makes it count comes last."""
    snapshots = Snapshots(objects, keep=2)
    snapshots.push(1, write(tmp_path / "one", a="1"))

    class CutError(Exception):
        pass

    def upload(name: str, path: Path) -> None:
        raise CutError

    cut = Snapshots(objects, keep=2)
    cut.objects.upload = upload  # type: ignore[method-assign]
    with pytest.raises(CutError):
        cut.push(2, write(tmp_path / "two", a="2"))
    assert Snapshots(objects, keep=2).latest() == 1


@pytest.mark.parametrize("damage", ["changed", "gone", "no json", "no files", "outside"])
def test_a_damaged_snapshot_is_removed_and_the_one_before_it_taken(
    objects: Objects, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CKPT-17, on a store of objects."""
    snapshots = Snapshots(objects, keep=2)
    snapshots.push(1, write(tmp_path / "work", a="1"))
    before = set(objects.names("blobs/"))
    snapshots.push(2, write(tmp_path / "work", a="2"))
    (blob,) = set(objects.names("blobs/")) - before
    name = "snapshot_000002.json"
    {
        "changed": lambda: objects.put(blob, b"3"),
        "gone": lambda: objects.delete(blob),
        "no json": lambda: objects.put(name, b"{"),
        "no files": lambda: objects.put(name, b"[]"),
        "outside": lambda: objects.put(
            name, json.dumps({"files": {"../a": blob.removeprefix("blobs/")}}).encode()
        ),
    }[damage]()
    assert snapshots.pull(tmp_path / "out") == 1
    assert contents(tmp_path / "out") == {"a": "1"}
    assert "snapshot of step 2" in caplog.text
    assert not (tmp_path / "a").exists()
    assert snapshots.latest() == 1


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("endpoint", "region", "named"),
    [
        ("127.0.0.1:9000", "", r"storage\.endpoint_url '127\.0\.0\.1:9000'"),
        (None, "eu west", "AWS_DEFAULT_REGION"),
    ],
)
def test_an_address_that_is_none_is_named_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, region: str, named: str
) -> None:
    """mlflow/mlflow#1990: `Invalid endpoint`, for want of http://."""
    if region:
        monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    with pytest.raises(ObjectsError, match=named):
        Objects("s3://team/x", endpoint_url=endpoint)
