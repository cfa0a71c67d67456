"""Objects of S3 (or a server that speaks it) through boto3, with errors that a person can act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from polyturn.data.files import atomic_path
from polyturn.data.quarantine import RowError
from polyturn.params import ImagesParams, ParamsError

_MAX_DATASET_BYTES = 2**40
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


def split_uri(uri: str) -> tuple[str, str]:
    """("bucket", "key/of/object") of s3://bucket/key/of/object.

    Raises:
        RowError: bad_url.
    """
    bucket, _, key = uri[len("s3://") :].partition("/")
    if not bucket:
        raise RowError("bad_url", f"{uri!r} names no bucket")
    return bucket, key


def parent_uri(uri: str) -> str:
    """The folder of an object; a URI that ends in / is a folder already."""
    return uri.rstrip("/") if "." not in uri.rsplit("/", 1)[-1] else uri.rsplit("/", 1)[0]


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
        return RowError(f"s3_{code}", f"S3 answers {code}")
    if isinstance(error, NoCredentialsError):
        return S3AccessError(
            f"{uri}: no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials"
        )
    return S3AccessError(
        f"{uri}: {where} cannot be reached ({type(error).__name__}); check images.s3_endpoint_url and the network"
    )


class ObjectStore:
    """Objects of the endpoint in params section images, whose time limits and retries apply.

    Safe to share between threads; credentials are read when it is made.
    """

    def __init__(self, limits: ImagesParams) -> None:
        self._endpoint_url = limits.s3_endpoint_url
        config = Config(
            retries={"mode": "standard", "max_attempts": limits.retries + 1},
            connect_timeout=limits.connect_timeout_s,
            read_timeout=limits.read_timeout_s,
            max_pool_connections=limits.concurrency,
            user_agent_extra=limits.user_agent,
        )
        client = Session().client("s3", endpoint_url=limits.s3_endpoint_url, config=config)
        self._client = cast("_Client", client)

    def read(self, uri: str, *, max_bytes: int) -> bytes:
        """The bytes of one object.

        Raises:
            RowError: s3_<code> such as s3_NoSuchKey, too_large, empty_body.
            S3AccessError: wrong key, missing bucket, expired credential, unreachable endpoint.
        """
        bucket, key = split_uri(uri)
        try:
            response = self._client.get_object(Bucket=bucket, Key=key)
            size = int(str(response["ContentLength"]))
            if size > max_bytes:
                raise RowError(
                    "too_large", f"object has {size} bytes, images.max_bytes is {max_bytes}"
                )
            data = cast("BinaryIO", response["Body"]).read()
        except (ClientError, BotoCoreError) as error:
            raise explain(error, uri, self._endpoint_url) from None
        if not data:
            raise RowError("empty_body", "the object has 0 bytes")
        return data

    def download_dataset(self, uri: str, directory: Path) -> tuple[Path, ...]:
        """Download a .jsonl or .parquet object, or all of a folder's, and return the files by name.

        A file of a folder below is named by both, such as train__0000.parquet: its split may stand in either.

        Raises:
            S3AccessError: see `read`.
            ParamsError: there is nothing to read.
        """
        bucket, key = split_uri(uri)
        try:
            keys = [key] if key.endswith((".jsonl", ".parquet")) else self._list(bucket, key)
        except (ClientError, BotoCoreError) as error:
            raise explain(error, uri, self._endpoint_url) from None
        if not keys:
            raise ParamsError(f"data.path: {uri} holds no .jsonl or .parquet object")
        files: list[Path] = []
        for name in keys:
            below = name.removeprefix(f"{key.rstrip('/')}/") if name != key else Path(name).name
            target = directory / below.replace("/", "__")
            try:
                data = self.read(f"s3://{bucket}/{name}", max_bytes=_MAX_DATASET_BYTES)
            except RowError as error:
                raise ParamsError(f"data.path: s3://{bucket}/{name}: {error}") from None
            with atomic_path(target) as partial:
                partial.write_bytes(data)
            files.append(target)
        return tuple(sorted(files))

    def _list(self, bucket: str, prefix: str) -> list[str]:
        """problems.jsonl of a folder, else its .jsonl, else its .parquet objects."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix.rstrip("/") + "/" if prefix else ""
        )
        objects = (
            o for page in pages for o in cast("list[Mapping[str, str]]", page.get("Contents", []))
        )
        keys = sorted(o["Key"] for o in objects if o["Key"].endswith((".jsonl", ".parquet")))
        chosen = [key for key in keys if key.rsplit("/", 1)[-1] == "problems.jsonl"]
        return chosen or [key for key in keys if key.endswith(".jsonl")] or keys
