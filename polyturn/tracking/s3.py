"""The preflight of an S3 artifact store: credentials and a real put, before any training."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from polyturn.objects import ObjectsError, session

_PROBE = ".polyturn-preflight"


class S3Error(ValueError):
    """The bucket cannot be written; the message says what is missing."""


def check(location: str, timeout_s: float) -> None:
    """Put and delete a small object below `location` (s3://bucket/prefix).

    Raises:
        S3Error: half a pair of keys, no credentials, or the put fails or takes longer than timeout_s.
    """
    try:
        opened = session(
            repr(location), also=", and MLFLOW_S3_ENDPOINT_URL for a store other than AWS"
        )
    except ObjectsError as error:
        raise S3Error(str(error)) from None
    parts = urlsplit(location)
    key = f"{parts.path.strip('/')}/{_PROBE}".lstrip("/")
    endpoint = os.environ.get("MLFLOW_S3_ENDPOINT_URL")
    config = Config(
        connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1}
    )
    try:
        client = opened.client("s3", endpoint_url=endpoint, config=config)
        client.put_object(Bucket=parts.netloc, Key=key, Body=b"")
        client.delete_object(Bucket=parts.netloc, Key=key)
    except (BotoCoreError, ClientError, ValueError) as error:
        raise S3Error(
            f"{location!r} cannot be written ({error}); check the bucket, the credentials and "
            f"MLFLOW_S3_ENDPOINT_URL ({endpoint or 'not set: AWS'})"
        ) from None
