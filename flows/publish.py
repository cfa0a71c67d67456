"""How the results of a worktree outlive it: files in runs/NAME, an experiment of DVC, DVC's remote."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows import dvc_commands as dvc
from flows.place import ROOT, Place, page
from polyturn import layout
from polyturn.report import card

_KEPT = (
    layout.PARAMS, layout.DVC_LOCK, layout.METRICS, layout.REGISTERED, layout.REPORT, card.HTML, card.MARKDOWN,
)  # fmt: skip


def copy_out(place: Place) -> Path:
    """Copy what people read into runs/NAME of the checkout; return that directory."""
    kept = ROOT / "runs" / place.identity.name
    kept.mkdir(parents=True, exist_ok=True)
    for path in (place.root / name for name in _KEPT):
        if path.is_file():
            shutil.copy(path, kept)
    return kept


@task(
    name="publish", task_run_name="publish", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5
)
def publish(place: Place, mlflow_url: str | None) -> str:
    """Save the run as an experiment under its name, and push data and experiment where there is a remote.

    The experiment's message links the run in Prefect and in MLflow. What it is called, and where it went, is returned.

    Raises:
        DvcError: DVC refuses, or the remote does not take the data.
    """
    name = place.identity.name
    save = ["exp", "save", "--name", name, "--force", "--message", _message(place, mlflow_url)]
    for path in dvc.plain_outs(place.root):  # files of git that git does not know yet
        save += ["--include-untracked", path] if (place.root / path).is_file() else []
    with _one_at_a_time():
        dvc.run(place.root, *save, env=_author(place))
    if dvc.default_remote(place.root) is None:
        return f"{name} (dvc exp show)"
    dvc.run(place.root, "push")
    return f"{name}, pushed" if _push_experiment(place, name) else f"{name} (its data are pushed)"


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """DVC's experiments of two worktrees, saved at the same moment, see each other's half-written git objects."""
    lock = ROOT / layout.STATE / "experiments.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _message(place: Place, mlflow_url: str | None) -> str:
    identity = place.identity
    lines = [f"{identity.name}: {identity.owner}, {identity.branch or identity.commit[:12]}"]
    lines += [f"Prefect: {url}" for url in (page(),) if url]
    lines += [f"MLflow: {mlflow_url}"] if mlflow_url else []
    return "\n".join(lines)


def _author(place: Place) -> dict[str, str]:
    owner = place.identity.owner
    return {
        **os.environ,
        "GIT_AUTHOR_NAME": owner,
        "GIT_COMMITTER_NAME": owner,
        "GIT_AUTHOR_EMAIL": os.environ.get("GIT_AUTHOR_EMAIL", f"{owner}@polyturn.invalid"),
        "GIT_COMMITTER_EMAIL": os.environ.get("GIT_COMMITTER_EMAIL", f"{owner}@polyturn.invalid"),
    }


def _push_experiment(place: Place, name: str) -> bool:
    """Push the experiment to the git remote `origin`, for `dvc exp pull`; without the right to, it stays here."""
    remotes = subprocess.run(
        ["git", "remote"], cwd=place.root, capture_output=True, text=True, check=False
    )
    if "origin" not in remotes.stdout.split():
        return False
    try:
        dvc.run(place.root, "exp", "push", "--force", "--no-cache", "origin", name)
    except dvc.DvcError as error:
        get_run_logger().warning("the experiment stays in this checkout: %s", error)
        return False
    return True
