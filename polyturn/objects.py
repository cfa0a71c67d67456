"""Objects below one s3:// address (AWS, or a server that speaks S3), with conditional writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from boto3.exceptions import Boto3Error
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from polyturn.data.files import atomic_path

KEY_PAIR = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_CONNECT_S = 10.0
_ABSENT = ("NoSuchKey", "404")
_CHANGED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_SHORT = ("SlowDown", "InternalError", "ServiceUnavailable", "500", "502", "503", "504")


class ObjectsError(ValueError):
    """The address cannot be used as configured; the message names what is missing."""


class UnreachableError(ConnectionError):
    """The store does not answer now; the same call may succeed later."""


class ChangedError(Exception):
    """A conditional write was refused: somebody else has written the object meanwhile."""


@dataclass(frozen=True)
class Stored:
    """An object as it was read: `etag` names this version; `age_s` is by the store's own clock."""

    data: bytes
    etag: str
    age_s: float


class _Client(Protocol):
    def put_object(self, **kwargs: object) -> Mapping[str, object]: ...
    def get_object(self, *, Bucket: str, Key: str) -> Mapping[str, object]: ...  # noqa: N803
    def delete_object(self, **kwargs: object) -> object: ...
    def get_paginator(self, name: str) -> _Paginator: ...
    def upload_file(self, path: str, bucket: str, key: str) -> None: ...
    def download_file(self, bucket: str, key: str, path: str) -> None: ...


class _Paginator(Protocol):
    def paginate(self, *, Bucket: str, Prefix: str) -> Iterator[Mapping[str, object]]: ...  # noqa: N803


class Objects:
    """Objects by name below `address` (s3://bucket/prefix); safe to share between threads.

    Every method raises UnreachableError where the store does not answer after retries, and ObjectsError where it refuses (wrong
    key, no such bucket, no right to do so).
    """

    def __init__(
        self, address: str, *, endpoint_url: str | None, attempts: int = 4, timeout_s: float = 60.0
    ) -> None:
        """Find credentials; nothing is sent yet.

        Raises:
            ObjectsError: no credentials, half a pair of keys, or no bucket in the address.
        """
        self.address = address.rstrip("/")
        self._endpoint_url = endpoint_url
        parts = urlsplit(self.address)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        if parts.scheme != "s3" or not self._bucket:
            raise ObjectsError(f"{address!r} is no s3://BUCKET/PREFIX")
        config = Config(
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=min(_CONNECT_S, timeout_s),
            read_timeout=timeout_s,
        )
        opened = session(address)
        try:
            client = opened.client("s3", endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            where = f"storage.endpoint_url {endpoint_url!r}" if endpoint_url else "AWS"
            raise ObjectsError(
                f"{address}: {where} cannot be used ({error}); check the address (http://HOST:PORT) and AWS_DEFAULT_REGION"
            ) from None
        self._client = cast("_Client", client)

    def get(self, name: str) -> Stored | None:
        """The object, or None where there is none."""
        try:
            with self._speaking():
                found = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
                data = cast("BinaryIO", found["Body"]).read()
        except FileNotFoundError:
            return None
        answer = cast("Mapping[str, Mapping[str, str]]", found["ResponseMetadata"])
        written = cast("datetime", found["LastModified"])
        now = datetime.strptime(answer["HTTPHeaders"]["date"], "%a, %d %b %Y %H:%M:%S %Z")
        age = now.replace(tzinfo=written.tzinfo) - written
        return Stored(data, str(found["ETag"]), age.total_seconds())

    def put(self, name: str, data: bytes) -> str:
        """Write an object over whatever is there; return its etag."""
        return self._put(name, data, {})

    def put_new(self, name: str, data: bytes) -> str:
        """Write an object where there is none; return its etag.

        Raises:
            ChangedError: there is one.
        """
        return self._put(name, data, {"IfNoneMatch": "*"})

    def put_over(self, name: str, data: bytes, etag: str) -> str:
        """Write an object over the version `etag` of it; return the new etag.

        Raises:
            ChangedError: there is another version, or none.
        """
        return self._put(name, data, {"IfMatch": etag})

    def _put(self, name: str, data: bytes, condition: Mapping[str, str]) -> str:
        try:
            with self._speaking():
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=self._key(name), Body=data, **condition
                )
        except FileNotFoundError:
            raise ChangedError(name) from None
        return str(answer["ETag"])

    def upload(self, name: str, path: Path) -> None:
        """Write a file of any size."""
        with self._speaking():
            self._client.upload_file(str(path), self._bucket, self._key(name))

    def download(self, name: str, path: Path) -> None:
        """Read an object into a file.

        Raises:
            FileNotFoundError: there is none.
        """
        with atomic_path(path) as partial, self._speaking():
            self._client.download_file(self._bucket, self._key(name), str(partial))

    def delete(self, name: str, *, only: str | None = None) -> None:
        """Remove an object, if there is one; `only`: that version of it (ChangedError if it is another)."""
        condition = {} if only is None else {"IfMatch": only}
        try:
            with self._speaking():
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name), **condition)
        except FileNotFoundError:
            return

    def names(self, prefix: str = "") -> list[str]:
        """Names of all objects that begin with `prefix`, sorted."""
        start = self._key(prefix)
        found: list[str] = []
        with self._speaking():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=start
            )
            for page in pages:
                found += [
                    entry["Key"]
                    for entry in cast("list[Mapping[str, str]]", page.get("Contents", []))
                ]
        skipped = len(self._key(""))
        return sorted(key[skipped:] for key in found)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Turn the errors of boto3 into this module's; an absent object is a FileNotFoundError."""
        where = self._endpoint_url or "AWS"
        try:
            yield
        except (ClientError, BotoCoreError, Boto3Error) as error:
            # a transfer of files wraps the answer
            answer = error if isinstance(error, ClientError) else error.__context__
            if isinstance(answer, ClientError):
                raise _explained(answer, self.address, where) from None
            raise UnreachableError(
                f"{self.address}: {where} cannot be reached ({' '.join(str(error).split())}); check "
                "storage.endpoint_url and the network"
            ) from None


def _explained(error: ClientError, address: str, where: str) -> Exception:
    """What an answer of the store means."""
    code = str(
        cast("Mapping[str, Mapping[str, str]]", error.response)["Error"].get("Code", "unknown")
    )
    if code in _ABSENT:
        return FileNotFoundError(2, "no such object", address)
    if code in _CHANGED:
        return ChangedError(address)
    if code in _SHORT:
        return UnreachableError(f"{address}: {where} answers {code}")
    return ObjectsError(
        f"{address}: {where} answers {code}; check the bucket, {KEY_PAIR[0]}, {KEY_PAIR[1]} and "
        "storage.endpoint_url"
    )


def session(address: str, *, also: str = "") -> Session:
    """A session with credentials; `also` is what else to set where there are none.

    The instance metadata address is not asked unless AWS_EC2_METADATA_DISABLED=false says so: outside AWS it only makes a
    missing setting look like a hang.

    Raises:
        ObjectsError: half a pair of keys, settings that cannot be used, or no credentials.
    """
    missing = [name for name in KEY_PAIR if not os.environ.get(name)]
    if len(missing) == 1:
        raise ObjectsError(
            f"{address} needs both of {KEY_PAIR[0]} and {KEY_PAIR[1]}; {missing[0]} is not set"
        )
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    try:
        found = Session()
        credentials = found.get_credentials()
    except BotoCoreError as error:  # a profile or a file that is not as it should be
        raise ObjectsError(
            f"{address}: the AWS settings of the environment cannot be used ({error}); check AWS_PROFILE and ~/.aws"
        ) from None
    if credentials is None:
        raise ObjectsError(
            f"{address} has no credentials: set {KEY_PAIR[0]} and {KEY_PAIR[1]} (or AWS_PROFILE, or "
            f"AWS_EC2_METADATA_DISABLED=false for an instance role){also}"
        )
    return found
