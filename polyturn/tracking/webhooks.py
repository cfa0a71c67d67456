"""MLflow's webhooks: asking the server to tell of alias moves, and checking that a message is the server's.

The signature is that of Standard Webhooks (https://www.standardwebhooks.com) under MLflow's header names.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from mlflow.exceptions import MlflowException

from polyturn.tracking.store import Store, TrackingError, first_line

DELIVERY_HEADER = "X-MLflow-Delivery-Id"
TIME_HEADER = "X-MLflow-Timestamp"
SIGNATURE_HEADER = "X-MLflow-Signature"

_EVENT = "model_version_alias.created"
_MAX_AGE_S = 300  # older messages are replays


class WebhookError(TrackingError):
    """A message is not the server's, or is of no use; nothing was started."""


@dataclass(frozen=True)
class AliasMove:
    """What the server tells: `alias` of `model` names `version` now; `delivery` is the same when it is told again."""

    model: str
    alias: str
    version: int
    delivery: str


def subscribe(store: Store, name: str, url: str, secret: str) -> str:
    """Let the server tell `url` of every alias move; one webhook of a name is kept. Returns its id.

    Raises:
        TrackingError: the store is no server, or it refuses (its MLFLOW_WEBHOOK_* settings, docs/registry.md).
    """
    if store.addresses.database is not None:
        raise TrackingError(
            f"tracking.uri {store.addresses.uri!r} is a file, which tells nobody of alias moves; webhooks need a server"
        )
    client = store.client
    try:
        for old in client.list_webhooks():
            if old.name == name:
                client.delete_webhook(old.webhook_id)
        created = client.create_webhook(
            name, url, [_EVENT], description="starts a Prefect deployment", secret=secret
        )
    except MlflowException as error:
        raise TrackingError(
            f"the server at {store.addresses.uri!r} takes no webhook to {url!r} ({first_line(error)})"
        ) from None
    return str(created.webhook_id)


def read_message(
    headers: Mapping[str, str], body: bytes, secret: str, *, now_s: float
) -> AliasMove:
    """Check a message's signature and age, and take it apart.

    Raises:
        WebhookError: it is not signed with `secret`, too old, or tells of something else.
    """
    delivery, sent = headers.get(DELIVERY_HEADER, ""), headers.get(TIME_HEADER, "")
    if not sent.isdigit() or abs(now_s - int(sent)) > _MAX_AGE_S:
        raise WebhookError(f"the message is {_MAX_AGE_S} s old or more, or says no time: {sent!r}")
    expected = signature(secret, delivery, sent, body)
    if not hmac.compare_digest(expected, headers.get(SIGNATURE_HEADER, "")):
        raise WebhookError("the message is not signed with the secret of the webhook")
    try:
        message = cast("Mapping[str, object]", json.loads(body))
        data = cast("Mapping[str, str]", message["data"])
        if f"{message['entity']}.{message['action']}" != _EVENT:
            raise WebhookError(f"the message tells of {message['entity']}.{message['action']}")
        return AliasMove(data["name"], data["alias"], int(data["version"]), delivery)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, WebhookError):
            raise
        raise WebhookError(f"the message is no alias move: {error}") from None


def signature(secret: str, delivery: str, sent: str, body: bytes) -> str:
    """ "v1," and base64 of HMAC-SHA256 over DELIVERY.TIME.BODY."""
    content = f"{delivery}.{sent}.".encode() + body
    digest = hmac.new(secret.encode(), content, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
