"""The preflight of an S3 artifact store: credentials and a real put, before any training."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

_PAIR = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PROBE = ".polyturn-preflight"


class S3Error(ValueError):
    """The bucket cannot be written; the message says what is missing."""


def check(location: str, timeout_s: float) -> None:
    """Put and delete a small object below `location` (s3://bucket/prefix).

    The instance metadata address is not asked unless AWS_EC2_METADATA_DISABLED=false says so: outside AWS it
    only makes a missing setting look like a hang.

    Raises:
        S3Error: half a pair of keys, no credentials, or the put fails or takes longer than timeout_s.
    """
    missing = [name for name in _PAIR if not os.environ.get(name)]
    if len(missing) == 1:
        raise S3Error(
            f"{location!r} needs both of {_PAIR[0]} and {_PAIR[1]}; {missing[0]} is not set"
        )
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    try:
        session = boto3.session.Session()
        credentials = session.get_credentials()
    except BotoCoreError as error:  # a profile or a file that is not as it should be
        raise S3Error(
            f"{location!r}: the AWS settings of the environment cannot be used ({error}); check AWS_PROFILE and ~/.aws"
        ) from None
    if credentials is None:
        raise S3Error(
            f"{location!r} has no credentials: set {_PAIR[0]} and {_PAIR[1]} (or AWS_PROFILE, or "
            "AWS_EC2_METADATA_DISABLED=false for an instance role), and MLFLOW_S3_ENDPOINT_URL for a "
            "store other than AWS"
        )
    parts = urlsplit(location)
    key = f"{parts.path.strip('/')}/{_PROBE}".lstrip("/")
    endpoint = os.environ.get("MLFLOW_S3_ENDPOINT_URL")
    config = Config(
        connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1}
    )
    try:
        client = session.client("s3", endpoint_url=endpoint, config=config)
        client.put_object(Bucket=parts.netloc, Key=key, Body=b"")
        client.delete_object(Bucket=parts.netloc, Key=key)
    except (BotoCoreError, ClientError, ValueError) as error:
        raise S3Error(
            f"{location!r} cannot be written ({error}); check the bucket, the credentials and "
            f"MLFLOW_S3_ENDPOINT_URL ({endpoint or 'not set: AWS'})"
        ) from None
