"""An S3 server on loopback for tests (moto), and what a client of it needs in its environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import httpx
from moto.server import ThreadedMotoServer

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def serving(*buckets: str, port: int = 0) -> Iterator[str]:
    """The address of a server, one at a time in a process, with these buckets: empty, unless it comes back at its `port`."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it tells of every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client(
            "s3",
            "us-east-1",
            endpoint_url=url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        if port == 0:
            _forget(url)
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
        yield url
    finally:
        server.stop()


def _forget(url: str) -> None:
    """Drop what an earlier server of this process was given: moto keeps one state for all of them."""
    answer = httpx.post(f"{url}/moto-api/reset")
    assert answer.status_code == httpx.codes.OK, answer.text
