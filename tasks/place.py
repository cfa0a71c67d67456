"""Where the stage `train` works: below the checkout, on a shared path, or here with its checkpoints on S3.

The lease is held until the stage's outputs are accepted; only then do the checkpoints go.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyturn import directories
from polyturn.objects import Objects
from polyturn.params import Params, TrainParams
from polyturn.pipeline import lease
from polyturn.pipeline.checkout import from_home, main_checkout
from polyturn.pipeline.object_lease import ObjectLease
from polyturn.pipeline.work_key import work_key
from polyturn.training.snapshots import Snapshots
from tasks.context import StageContext
from tasks.mirror import Mirror, newest_step

logger = logging.getLogger(__name__)

_LEASE = "lease.json"
_S3 = "s3://"


@dataclass(frozen=True)
class Place:
    """A leased work directory; `address` is where another worker finds its checkpoints."""

    directory: Path
    address: str
    mirror: Mirror | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """While training runs: checkpoints are mirrored, where they are to live elsewhere.

        Raises:
            LeaseError: somebody else has taken the lease.
        """
        if self.mirror is None:
            yield
            return
        with self.mirror:
            yield


def occupy(ctx: StageContext) -> Place:
    """Lease the place of this run's key for as long as `ctx.held` lasts, and bring its newest checkpoint here.

    Raises:
        LeaseError: somebody else works there.
        ValueError: train.work_uri cannot be used.
    """
    uri = ctx.params.train.work_uri
    key = work_key("train", ctx.params)
    work = (ctx.work_dir if uri.startswith(_S3) or not uri else _shared(uri)) / key
    _make(work.parent)
    ctx.held.enter_context(
        lease.hold(work.with_suffix(".lock"), what=f"training run {key}", parent=None)
    )
    is_anew = ctx.params.train.resume == "never"
    if is_anew:
        shutil.rmtree(work, ignore_errors=True)
    if not uri.startswith(_S3):
        work.mkdir(parents=True, exist_ok=True)
        ctx.cleanups.append(partial(directories.remove, work))
        return Place(work, str(work.absolute()))
    address = f"{uri.rstrip('/')}/{key}"
    found = snapshots_at(address, ctx.params)
    held = _lease(found.objects, ctx.params.train, what=f"training run {key}")
    ctx.held.callback(held.release)
    if is_anew:
        found.remove()
    fetch_newer(found, work)
    work.mkdir(parents=True, exist_ok=True)
    ctx.cleanups.extend([found.remove, partial(directories.remove, work)])
    return Place(work, address, Mirror(work, found, held))


def snapshots_at(address: str, params: Params) -> Snapshots:
    """The snapshots below an s3:// address."""
    objects = Objects(address, endpoint_url=params.storage.endpoint_url)
    return Snapshots(objects, keep=params.train.keep_checkpoints)


def fetch_newer(found: Snapshots, work: Path) -> None:
    """Replace the work directory by the newest snapshot, if that is further than what is here."""
    here, there = newest_step(work), found.latest()
    if there is None or (here is not None and here >= there):
        return
    step = found.pull(work)
    if step is not None:
        logger.info("train: fetched the checkpoint of step %d from %s", step, found.objects.address)


def shared_directory(chosen: Params) -> Path:
    """The work directory of a gang, which its hosts share and the stage on the first of them leases."""
    return _shared(chosen.train.work_uri) / work_key("train", chosen)


def _lease(objects: Objects, chosen: TrainParams, *, what: str) -> ObjectLease:
    held = ObjectLease(objects, _LEASE, seconds=chosen.lease_s, on_loss=_end_training)
    held.acquire(what)
    return held


def _end_training() -> None:
    """Somebody else trains this run now; the mirror's context tells who."""
    os.kill(os.getpid(), signal.SIGTERM)


def _shared(uri: str) -> Path:
    return main_checkout(Path.cwd()) / from_home(uri)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"train.work_uri must be a directory that can be made and written, got {directory}: {error.strerror}"
        ) from None
