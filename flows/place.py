"""Where a flow run works, and what it is called: one name, owner and branch in Prefect, MLflow and DVC."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from prefect.utilities.urls import url_for

from polyturn import layout
from polyturn.login import login
from polyturn.pipeline import lease, workspace

ROOT = Path(__file__).resolve().parent.parent
_MAX_NAME = 100  # a file's name has 255 at most, some file systems' 143, with what is put before and behind it


@dataclass(frozen=True)
class Identity:
    """What a run is called everywhere; `branch` and `commit` are empty outside git."""

    name: str
    owner: str
    branch: str
    commit: str

    @property
    def prefect_tags(self) -> list[str]:
        """Tags of the flow run, by which the UI filters."""
        named = {"owner": self.owner, "branch": self.branch, "commit": self.commit[:12]}
        return [f"{key}:{value}" for key, value in named.items() if value]

    @property
    def mlflow_tags(self) -> dict[str, str]:
        """Tags of the MLflow run: the same words, and where the flow run is."""
        tags = {
            "mlflow.user": self.owner,
            "mlflow.source.git.branch": self.branch,
            "mlflow.source.git.commit": self.commit,
            "prefect.flow_run_id": str(flow_run.get_id()),
            "prefect.flow_run_name": str(flow_run.get_name()),
            "prefect.url": page() or "",
            "dvc.experiment": self.name,
        }
        return {key: value for key, value in tags.items() if value}


@dataclass(frozen=True)
class Place:
    """The checkout that a flow run works in."""

    root: Path
    identity: Identity
    is_worktree: bool


def identify(revision: str | None, owner: str | None) -> Identity:
    """Name the run after its flow run, and say so in the flow run's tags.

    Raises:
        WorkspaceError: the revision is unknown.
    """
    commit = workspace.resolve(ROOT, revision) if revision else _git("rev-parse", "HEAD")
    branch = (
        revision if revision and revision != commit else _git("symbolic-ref", "--short", "HEAD")
    )
    identity = Identity(
        name=file_name(str(flow_run.get_name())),
        owner=owner or login(),
        branch=branch if branch != commit else "",
        commit=commit,
    )
    _tag(identity.prefect_tags)
    return identity


@contextlib.contextmanager
def open_worktree(
    identity: Identity, changes: Mapping[str, object], *, is_head: bool
) -> Iterator[Place]:
    """A git worktree of the identity's commit, for as long as the context lasts nobody else's; it is not removed.

    `is_head`: the commit is the checkout's own, and edits there are meant to be part of the run.

    Raises:
        WorkspaceError: it cannot be made, or there are such edits, which are not committed.
        LeaseError: another run of that name works here.
    """
    lock = ROOT / layout.STATE / "locks" / f"{identity.name}.lock"
    with lease.hold(lock, what=f"a run called {identity.name}", parent=None):
        root = workspace.create(
            ROOT, identity.name, changes, revision=None if is_head else identity.commit
        )
        yield Place(root, identity, is_worktree=True)


def file_name(name: str) -> str:
    """A flow run's name as a directory, a git reference and an experiment of DVC: 100 characters at most.

    >>> [file_name(name) for name in ("polite-otter", "lr 1e-5 / again", "..")]
    ['polite-otter', 'lr-1e-5-again', 'run']
    """
    text = re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9_-]+", "-", name)).strip("-") or "run"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 9]}-{digest}"


def page() -> str | None:
    """The flow run's page in Prefect's UI; None where only a temporary server runs."""
    with contextlib.suppress(ValueError):
        return url_for("flow-run", obj_id=str(flow_run.get_id()))
    return None


def _tag(tags: list[str]) -> None:
    wanted = sorted({*flow_run.get_tags(), *tags})
    # That of a deployment's run is known already; flows/at_work.py looks whether it lives.
    pid = None if deployment.get_id() else str(os.getpid())
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.get_id()), tags=wanted, infrastructure_pid=pid)
    get_run_logger().info("this run is %s", ", ".join(tags))


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
