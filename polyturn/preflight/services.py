"""What a run talks to: buckets, MLflow, Prefect."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import httpx

from polyturn.objects import ChangedError, Objects, UnreachableError
from polyturn.params import Params
from polyturn.preflight.finding import Finding, Site

_PROBE = ".polyturn-preflight"
PREFECT_URL = "PREFECT_API_URL"
_PREFECT_AUTH = "PREFECT_API_AUTH_STRING"


def buckets(site: Site) -> Finding:
    """Every bucket that params name takes an object, gives it back, refuses to write over it unasked, and removes it."""
    addresses = bucket_addresses(site.params)
    if not addresses:
        return Finding("s3", "skipped", "params name no s3:// address")
    for key, address in addresses.items():
        try:
            problem = _try_bucket(address, site.params)
            may_pass = False
        except (ValueError, OSError) as error:
            problem, may_pass = str(error), isinstance(error, UnreachableError)
        if problem:
            return Finding("s3", "failed", f"{key} {problem}", "set the keys, the endpoint or the bucket's rights; without S3 empty the key", may_pass)  # fmt: skip
    return Finding("s3", "ok", f"put, get and delete in {', '.join(addresses.values())}")


def bucket_addresses(chosen: Params) -> dict[str, str]:
    """The s3:// addresses of params by their key."""
    named = {
        "storage.url": chosen.storage.url,
        "train.work_uri": chosen.train.work_uri,
        "tracking.artifact_location": chosen.tracking.artifact_location,
    }
    return {key: value for key, value in named.items() if value and value.startswith("s3://")}


def _try_bucket(address: str, chosen: Params) -> str:
    """What is wrong with it; "" for nothing."""
    objects = Objects(
        address,
        endpoint_url=_endpoint(address, chosen),
        attempts=1,
        timeout_s=chosen.tracking.timeout_s,
    )
    name, content = f"{_PROBE}-{uuid.uuid4().hex}", uuid.uuid4().bytes
    objects.put_new(name, content)
    try:
        stored = objects.get(name)
        if stored is None or stored.data != content:
            return f"{address}: what was put does not come back"
        try:
            objects.put_new(name, b"")
        except ChangedError:
            return ""
        return (
            f"{address}: the store ignores If-None-Match, so that a lease there would not keep two workers apart; use "
            "AWS, MinIO, SeaweedFS or another store with conditional writes"
        )
    finally:
        objects.delete(name)


def _endpoint(address: str, chosen: Params) -> str | None:
    if address == chosen.tracking.artifact_location:
        return os.environ.get("MLFLOW_S3_ENDPOINT_URL")
    return chosen.storage.endpoint_url


def mlflow(site: Site) -> Finding:
    """The tracking store answers; a SQLite file can be written."""
    # MLflow takes seconds to load, and `doctor --help` none.
    from polyturn import tracking  # noqa: PLC0415
    from polyturn.tracking import store  # noqa: PLC0415

    addresses = store.resolve(site.params.tracking, site.root)
    if addresses.database is not None:
        return _writable(addresses.database)
    try:
        store.connect(site.params.tracking, site.root)
    except tracking.TrackingError as error:
        return Finding("mlflow", "failed", str(error), "start the server, or set tracking.uri: sqlite:///mlflow.db")  # fmt: skip
    return Finding("mlflow", "ok", addresses.uri)


def _writable(database: Path) -> Finding:
    place = database if database.exists() else next(p for p in database.parents if p.exists())
    if (place == database or place.is_dir()) and os.access(place, os.W_OK):
        return Finding("mlflow", "ok", f"sqlite:///{database}")
    return Finding("mlflow", "failed", f"{place} cannot be written", "name a writable path in tracking.uri")  # fmt: skip


def prefect(site: Site) -> Finding:
    """The Prefect server that the environment names answers; runs without one need none."""
    url = os.environ.get(PREFECT_URL)
    if not url:
        return Finding(
            "prefect", "skipped", f"{PREFECT_URL} is not set: a flow starts a server of its own"
        )
    # Not /health: it answers also where every other call would be refused.
    auth = os.environ.get(_PREFECT_AUTH, "").partition(":")
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/admin/version",
            timeout=site.params.tracking.timeout_s,
            auth=(auth[0], auth[2]) if auth[1] else None,
        )
    except httpx.HTTPError as error:
        return Finding("prefect", "failed", f"{PREFECT_URL} {url} does not answer ({error})", "start the server, or unset the variable", may_pass=True)  # fmt: skip
    if answer.status_code != httpx.codes.OK:
        return Finding("prefect", "failed", f"{PREFECT_URL} {url} answers {answer.status_code}", f"check the address (it ends in /api) and {_PREFECT_AUTH}")  # fmt: skip
    return Finding("prefect", "ok", f"{url}, version {answer.text.strip().strip(chr(34))}")


def champion(site: Site) -> Finding:
    """The weights of the registry's champion and challenger are where they were stored."""
    from polyturn import tracking  # noqa: PLC0415 - see `mlflow`
    from polyturn.tracking import store, stored  # noqa: PLC0415

    addresses = store.resolve(site.params.tracking, site.root)
    if addresses.database is not None and not addresses.database.exists():
        return Finding("champion", "skipped", "nothing is registered yet")
    try:
        missing = stored.check_champion(site.root, site.params)
    except tracking.TrackingError as error:
        return Finding("champion", "failed", str(error), "start the server, or mend tracking.uri")
    if missing is None:
        return Finding("champion", "skipped", f"no model {site.params.registry.name} is registered")
    if missing:
        return Finding("champion", "failed", "; ".join(missing), "`dvc pull`, restore the store, or register another version")  # fmt: skip
    return Finding("champion", "ok", f"what {site.params.registry.name} names is in its stores")
