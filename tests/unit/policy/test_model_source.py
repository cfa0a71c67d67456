"""model.path: a directory, an id of the hub, or an s3:// address, and what each says when nothing is there."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import boto3
import pytest

from polyturn.params import ModelParams
from polyturn.policy.model import ModelError
from polyturn.policy.model_source import resolve
from tests import s3


def test_a_path_that_is_nothing_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(ModelError, match=r"model.path: directory .* does not exist"):
            resolve(ModelParams(path=path), tmp_path, endpoint_url=None)
    assert resolve(ModelParams(path=str(tmp_path)), tmp_path, endpoint_url=None) == (tmp_path, None)


@pytest.mark.parametrize("path", ["Qwen/Qwen3 VL", "Qwen/", "a/b--c", "Qwen/-x"])
def test_what_cannot_be_a_hub_id_is_one_line(path: str, tmp_path: Path) -> None:
    """databrickslabs/dolly #187: the hub's library speaks of a repo id, and of no key."""
    with pytest.raises(ModelError, match=rf"model.path: {path} is no directory here and no hub id"):
        resolve(ModelParams(path=path), tmp_path, endpoint_url=None)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server with the bucket `team`."""
    with s3.serving("team") as url:
        yield url


def put(server: str, names: Mapping[str, str | bytes]) -> None:
    """Make these the objects of the bucket."""
    client = boto3.client("s3", endpoint_url=server)
    for old in client.list_objects_v2(Bucket="team").get("Contents", []):
        client.delete_object(Bucket="team", Key=old["Key"])
    for name, text in names.items():
        client.put_object(Bucket="team", Key=name, Body=text)


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server; a user's environment has the keys to it, and storage.endpoint_url its address."""
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return server


def files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_model_on_s3_is_its_files_and_not_the_folders_that_a_console_shows(
    bucket: str, tmp_path: Path
) -> None:
    """mermaid-api #757, mlflow #23324: an object named like the prefix was written as a file, and nothing could lie below."""
    put(
        bucket,
        {
            "m/qwen/": "",
            "m/qwen/config.json": "c",
            "m/qwen/extra/": "",
            "m/qwen/model.safetensors": "w",
            "m/qwen/optimizer.pt": "not wanted",
            "m/qwen2/config.json": "of another model",
        },
    )
    for uri in ("s3://team/m/qwen", "s3://team/m/qwen/"):
        directory, revision = resolve(ModelParams(path=uri), tmp_path, endpoint_url=bucket)
        assert files(directory) == {"config.json": "c", "model.safetensors": "w"}
        assert revision is None


def test_shards_of_a_model_that_was_replaced_on_s3_are_not_kept(
    bucket: str, tmp_path: Path
) -> None:
    put(
        bucket,
        {"m/config.json": "1", "m/model.safetensors.index.json": "{}", "m/a.safetensors": "a"},
    )
    first, _ = resolve(ModelParams(path="s3://team/m"), tmp_path, endpoint_url=bucket)
    put(bucket, {"m/config.json": "2", "m/model.safetensors": "w"})
    second, _ = resolve(ModelParams(path="s3://team/m"), tmp_path, endpoint_url=bucket)
    assert first == second
    assert files(second) == {"config.json": "2", "model.safetensors": "w"}


def test_an_address_without_a_model_is_named(bucket: str, tmp_path: Path) -> None:
    put(bucket, {"m/": "", "m/readme.md": "nothing here"})
    for uri, said in (
        ("s3://team/m", r"no \*.safetensors or .* lies under"),
        ("s3://nobody/m", "cannot be read: .*NoSuchBucket"),
    ):
        with pytest.raises(ModelError, match=rf"model.path: .*{said}"):
            resolve(ModelParams(path=uri), tmp_path, endpoint_url=bucket)


def test_without_storage_endpoint_url_the_environment_of_a_user_names_the_server(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, {"m/config.json": "c"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
    directory, _ = resolve(ModelParams(path="s3://team/m"), tmp_path, endpoint_url=None)
    assert files(directory) == {"config.json": "c"}


def test_a_server_that_does_not_answer_is_named_with_its_key(tmp_path: Path, bucket: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ModelError, match=rf"model.path: .*{nobody} cannot be reached") as caught:
        resolve(ModelParams(path="s3://team/m"), tmp_path, endpoint_url=nobody)
    assert "check storage.endpoint_url" in str(caught.value)
