"""Datasets and pictures on S3, against a real server on loopback (moto, with its own access checks)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from moto.server import ThreadedMotoServer

from polyturn.data.quarantine import RowError
from polyturn.data.raw import RawWriter
from polyturn.data.s3 import ObjectStore, S3AccessError, explain, parent_uri
from polyturn.data.sources import load_source
from polyturn.params import DataParams, ImagesParams, ParamsError
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply

_PLAIN = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with a bucket `data` that holds three pictures and a dataset."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3", "us-east-1", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret"
    )
    client.create_bucket(Bucket="data")
    rows = []
    for i, split in enumerate(("train", "val", "test")):
        client.put_object(Bucket="data", Key=f"geo/images/{i}.png", Body=png((32, 32), (i, 0, 0)))
        rows.append(
            {
                "id": f"r{i}",
                "split": split,
                "problem": "<image>x",
                "answer": i,
                "images": [f"images/{i}.png"],
            }
        )
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    client.put_object(Bucket="data", Key="geo/problems.jsonl", Body=body)
    client.put_object(Bucket="data", Key="geo/empty.png", Body=b"")
    yield url
    server.stop()


@pytest.fixture
def endpoint(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address, with credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return server


def test_pictures_come_from_s3_once_and_bad_objects_are_named(endpoint: str, stage: Stage) -> None:
    sources = {f"r{i}": f"s3://data/geo/images/{i}.png" for i in range(3)}
    bad = {"gone": "s3://data/geo/images/9.png", "empty": "s3://data/geo/empty.png", "odd": "s3://"}
    done = stage.run(
        {**sources, **bad, "text": "s3://data/geo/problems.jsonl"}, s3_endpoint_url=endpoint
    )
    assert done.kept == ["r0", "r1", "r2"]
    reasons = {name: row.reason for name, row in done.set_aside.items()}
    assert reasons == {
        "gone": "s3_NoSuchKey",
        "empty": "empty_body",
        "odd": "bad_url",
        "text": "not_an_image",
    }
    assert endpoint not in (done.out / "quarantine.jsonl").read_text()
    # With the store present, S3 is not needed.
    again = stage.run({**sources}, s3_endpoint_url="http://127.0.0.1:9")
    assert (again.kept, again.report.num_fetched) == (["r0", "r1", "r2"], 0)


@pytest.mark.parametrize(
    "path", ["s3://data/geo", "s3://data/geo/", "s3://data/geo/problems.jsonl"]
)
def test_a_dataset_on_s3_keeps_its_relative_pictures(
    endpoint: str, stage: Stage, path: str
) -> None:
    params = DataParams(source="geo3k", path=path)
    images = ImagesParams(s3_endpoint_url=endpoint)
    source = load_source(params, images, seed=0, work_dir=stage.root / "work")
    RawWriter(
        stage.root / "raw", source, params, None, parse_answer=str.strip, on_row=lambda: None
    ).write()
    done = stage.finish(stage.job(s3_endpoint_url=endpoint))
    assert done.kept == ["r0", "r1", "r2"]
    assert not (stage.root / "raw" / "pictures" / "images").exists()


@pytest.mark.parametrize("name", ["figure 1.png", "фиг+1.png", "a%20b.png", "x=1&y (2).png"])
def test_a_key_is_asked_for_as_it_is_written(endpoint: str, stage: Stage, name: str) -> None:
    """opensearch-project/data-prepper#1923, generalui/s3p#53: spaces, plus signs and percent signs in keys."""
    client = boto3.client("s3", endpoint_url=endpoint)
    client.put_object(Bucket="data", Key=f"odd/{name}", Body=png((32, 32), (7, 7, 7)))
    row = {"id": "r", "split": "train", "problem": "<image>x", "answer": 1, "images": [name]}
    client.put_object(Bucket="data", Key="odd/problems.jsonl", Body=json.dumps(row).encode())
    images = ImagesParams(s3_endpoint_url=endpoint)
    params = DataParams(source="geo3k", path="s3://data/odd")
    source = load_source(params, images, seed=0, work_dir=stage.root / "work")
    RawWriter(
        stage.root / "raw", source, params, None, parse_answer=str.strip, on_row=lambda: None
    ).write()
    assert stage.finish(stage.job(s3_endpoint_url=endpoint)).kept == ["r"]


def test_objects_whose_keys_differ_behind_a_sign_of_urls_are_different_pictures(
    endpoint: str, stage: Stage
) -> None:
    """S3 keys may hold ? and #, which are no query and no fragment there."""
    client = boto3.client("s3", endpoint_url=endpoint)
    keys = ["odd/a#1.png", "odd/a#2.png", "odd/a?token=1.png", "odd/a?token=2.png"]
    for shade, key in enumerate(keys):
        client.put_object(Bucket="data", Key=key, Body=png((32, 32), (shade, 0, 0)))
    sources = {key: f"s3://data/{key}" for key in keys}
    done = stage.run(sources, s3_endpoint_url=endpoint)
    stored = {str(row["images"]) for row in done.rows}
    assert (done.kept, len(stored)) == (keys, len(keys))


def test_files_of_one_name_in_several_folders_are_all_read(endpoint: str, tmp_path: Path) -> None:
    """The layout of the Hub's own Parquet files: default/train/0000.parquet beside default/test/0000.parquet."""
    client = boto3.client("s3", endpoint_url=endpoint)
    for split in ("train", "validation", "test"):
        body = json.dumps({"id": split, "problem": "x", "answer": 1}).encode()
        client.put_object(Bucket="data", Key=f"hub/default/{split}/0000.jsonl", Body=body)
    params = DataParams(source="geo3k", path="s3://data/hub")
    source = load_source(params, ImagesParams(s3_endpoint_url=endpoint), seed=0, work_dir=tmp_path)
    for split in ("train", "validation", "test"):
        assert [row["id"] for row in source.load(split)] == [split]


def test_a_missing_bucket_stops_the_run_and_loses_nothing(endpoint: str, stage: Stage) -> None:
    good = {f"r{i}": f"s3://data/geo/images/{i}.png" for i in range(3)}
    first = stage.run(good, s3_endpoint_url=endpoint)
    with pytest.raises(S3AccessError, match=r"NoSuchBucket.*images.s3_endpoint_url"):
        stage.run({**good, "x": "s3://nowhere/1.png"}, s3_endpoint_url=endpoint)
    assert sorted((first.out / "png").iterdir())
    images, params = (
        ImagesParams(s3_endpoint_url=endpoint),
        DataParams(source="geo3k", path="s3://nowhere/geo"),
    )
    with pytest.raises(S3AccessError, match="NoSuchBucket"):
        load_source(params, images, seed=0, work_dir=stage.root)
    params = DataParams(source="geo3k", path="s3://data/other")
    with pytest.raises(ParamsError, match="holds no"):
        load_source(params, images, seed=0, work_dir=stage.root)


def test_missing_credentials_and_a_dead_endpoint_say_what_to_do(
    endpoint: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(S3AccessError, match="cannot be reached"):
        stage.run(
            {"a": "s3://data/geo/images/0.png"}, s3_endpoint_url="http://127.0.0.1:9", retries=0
        )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(stage.root / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(stage.root / "none"))
    with pytest.raises(S3AccessError, match="AWS_ACCESS_KEY_ID"):
        ObjectStore(ImagesParams(s3_endpoint_url=endpoint)).read(
            "s3://data/geo/images/0.png", max_bytes=100
        )


def test_a_wrong_key_stops_the_run(endpoint: str, stage: Stage) -> None:
    request = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", b"0", _PLAIN, method="POST")
    urllib.request.urlopen(request)  # from now on moto checks who asks
    try:
        with pytest.raises(S3AccessError, match=r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID"):
            stage.run({"a": "s3://data/geo/images/0.png"}, s3_endpoint_url=endpoint)
    finally:
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth", b"inf", _PLAIN, method="POST"
        )
        urllib.request.urlopen(request)
    assert not (stage.root / "images").exists()


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestTimeTooSkewed"])
def test_an_expired_credential_stops_the_run(
    endpoint: str, web: Web, stage: Stage, code: str
) -> None:
    body = f"<Error><Code>{code}</Code><Message>The provided token has expired.</Message></Error>"
    web.add("/data/a.png", reply(body.encode(), status=400, kind="application/xml"))
    with pytest.raises(S3AccessError, match=rf"{code}.*AWS_SESSION_TOKEN"):
        stage.run({"a": "s3://data/a.png"}, s3_endpoint_url=web.url)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InvalidAccessKeyId", S3AccessError),
        ("SignatureDoesNotMatch", S3AccessError),
        ("ExpiredToken", S3AccessError),
        ("AccessDenied", S3AccessError),
        ("NoSuchBucket", S3AccessError),
        ("NoSuchKey", RowError),
        ("SlowDown", RowError),
    ],
)
def test_answers_of_s3_concern_one_object_or_the_run(code: str, kind: type[Exception]) -> None:
    error = explain(ClientError({"Error": {"Code": code}}, "GetObject"), "s3://b/k", None)
    assert isinstance(error, kind)
    assert code in str(error)


def test_errors_of_the_client_stop_the_run() -> None:
    for error in (NoCredentialsError(), EndpointConnectionError(endpoint_url="http://x")):
        assert isinstance(explain(error, "s3://b/k", None), S3AccessError)


def test_large_objects_are_refused_unread(endpoint: str) -> None:
    with pytest.raises(RowError, match="too_large"):
        ObjectStore(ImagesParams(s3_endpoint_url=endpoint)).read(
            "s3://data/geo/images/0.png", max_bytes=10
        )


@pytest.mark.parametrize(
    ("uri", "parent"),
    [
        ("s3://b/geo/problems.jsonl", "s3://b/geo"),
        ("s3://b/geo/", "s3://b/geo"),
        ("s3://b/geo", "s3://b/geo"),
        ("s3://b", "s3://b"),
    ],
)
def test_the_folder_of_a_uri(uri: str, parent: str) -> None:
    assert parent_uri(uri) == parent
