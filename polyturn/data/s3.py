"""Objects of S3 (or a server that speaks it) through boto3, with errors that a person can act on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from polyturn.data.files import atomic_path
from polyturn.data.quarantine import RowError
from polyturn.params import ParamsError

ACCESS_CODES = frozenset(
    {
        "AccessDenied",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "NoSuchBucket",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)


class S3AccessError(ValueError):
    """Credentials, bucket or endpoint are wrong: the run stops, because every other object would fail too."""


class _Client(Protocol):
    def get_object(self, *, Bucket: str, Key: str) -> Mapping[str, object]: ...  # noqa: N803
    def get_paginator(self, name: str) -> _Paginator: ...


class _Paginator(Protocol):
    def paginate(self, *, Bucket: str, Prefix: str) -> Iterator[Mapping[str, object]]: ...  # noqa: N803


@functools.lru_cache(maxsize=4)
def _client(endpoint_url: str | None) -> _Client:
    config = Config(
        retries={"mode": "standard", "max_attempts": 5},
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=64,
    )
    return cast("_Client", boto3.client("s3", endpoint_url=endpoint_url, config=config))


def split_uri(uri: str) -> tuple[str, str]:
    """("bucket", "key/of/object") of s3://bucket/key/of/object.

    Raises:
        RowError: bad_url.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise RowError("bad_url", f"{uri!r} names no bucket")
    return bucket, key


def parent_uri(uri: str) -> str:
    """The folder of an object; a URI that ends in / is a folder already."""
    return uri.rstrip("/") if "." not in uri.rsplit("/", 1)[-1] else uri.rsplit("/", 1)[0]


def read_object(uri: str, *, endpoint_url: str | None, max_bytes: int) -> bytes:
    """The bytes of one object.

    Raises:
        RowError: s3_<code> such as s3_NoSuchKey, too_large, empty_body.
        S3AccessError: wrong key, missing bucket, expired credential, unreachable endpoint.
    """
    bucket, key = split_uri(uri)
    try:
        response = _client(endpoint_url).get_object(Bucket=bucket, Key=key)
        size = int(str(response["ContentLength"]))
        if size > max_bytes:
            raise RowError("too_large", f"object has {size} bytes, images.max_bytes is {max_bytes}")
        data = cast("BinaryIO", response["Body"]).read()
    except (ClientError, BotoCoreError) as error:
        raise explain(error, uri, endpoint_url) from None
    if not data:
        raise RowError("empty_body", "the object has 0 bytes")
    return data


def explain(error: Exception, uri: str, endpoint_url: str | None) -> Exception:
    """The error that says what to do: S3AccessError for the whole run, RowError for one object."""
    where = endpoint_url or "AWS"
    if isinstance(error, ClientError):
        code = str(
            cast("Mapping[str, Mapping[str, object]]", error.response)["Error"].get(
                "Code", "unknown"
            )
        )
        if code in ACCESS_CODES:
            return S3AccessError(
                f"{uri}: {where} answers {code}; check the bucket's name, AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), and images.s3_endpoint_url"
            )
        return RowError(f"s3_{code}", f"{where} answers {code}")
    if isinstance(error, NoCredentialsError):
        return S3AccessError(
            f"{uri}: no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials"
        )
    return S3AccessError(
        f"{uri}: {where} cannot be reached ({type(error).__name__}); check images.s3_endpoint_url and the network"
    )


def download_dataset(uri: str, directory: Path, endpoint_url: str | None) -> tuple[Path, ...]:
    """Download a .jsonl or .parquet object, or all of a folder's, and return the files by name.

    Raises:
        S3AccessError: see `read_object`.
        ParamsError: there is nothing to read.
    """
    bucket, key = split_uri(uri)
    try:
        keys = [key] if key.endswith((".jsonl", ".parquet")) else _list(bucket, key, endpoint_url)
    except (ClientError, BotoCoreError) as error:
        raise explain(error, uri, endpoint_url) from None
    if not keys:
        raise ParamsError(f"data.path: {uri} holds no .jsonl or .parquet object")
    files: list[Path] = []
    for name in keys:
        target = directory / Path(name).name
        try:
            data = read_object(f"s3://{bucket}/{name}", endpoint_url=endpoint_url, max_bytes=2**40)
        except RowError as error:
            raise ParamsError(f"data.path: s3://{bucket}/{name}: {error}") from None
        with atomic_path(target) as partial:
            partial.write_bytes(data)
        files.append(target)
    return tuple(sorted(files))


def _list(bucket: str, prefix: str, endpoint_url: str | None) -> list[str]:
    pages = (
        _client(endpoint_url)
        .get_paginator("list_objects_v2")
        .paginate(Bucket=bucket, Prefix=prefix.rstrip("/") + "/" if prefix else "")
    )
    objects = (
        item for page in pages for item in cast("list[Mapping[str, str]]", page.get("Contents", []))
    )
    keys = sorted(item["Key"] for item in objects if item["Key"].endswith((".jsonl", ".parquet")))
    chosen = [key for key in keys if key.endswith("/problems.jsonl") or key == "problems.jsonl"]
    return chosen or [key for key in keys if key.endswith(".jsonl")] or keys
