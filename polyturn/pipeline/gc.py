"""`polyturn gc`: what nobody needs any more, by kind, and its removal."""

from __future__ import annotations

import fcntl
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyturn import layout
from polyturn.objects import Objects
from polyturn.params import Params
from polyturn.pipeline import dvc_objects, workspace
from polyturn.pipeline.checkout import WORKTREES, main_checkout
from polyturn.tracking.needs import Needs, RunRecord, find
from polyturn.tracking.removal import remove_runs
from polyturn.tracking.store import Store, connect

logger = logging.getLogger(__name__)

_S3 = "s3://"
_GONE = "Removing "  # how `dvc gc --dry` begins the line of an object


@dataclass(frozen=True)
class Item:
    """Something to remove; `size` in bytes where it is known."""

    kind: str
    name: str
    size: int | None
    remove: Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """What would be removed, and in words what is left alone although it may be in nobody's use."""

    items: Sequence[Item]
    notes: Sequence[str]


@dataclass(frozen=True)
class _Site:
    root: Path
    params: Params
    store: Store
    needs: Needs


def plan(root: Path, params: Params, *, keep_last: int, with_remote: bool) -> Plan:
    """Look what can go. Nothing is removed.

    Work directories and worktrees that a process holds stay, whatever MLflow says. DVC's objects stay as long as any
    run is in progress; those that a commit of any branch, tag or experiment, another worktree or the dvc.lock of a
    needed run names stay anyway. Before its remote is looked at, git's commits and experiments are fetched.

    Raises:
        TrackingError: MLflow does not answer.
        DvcError: DVC fails.
    """
    home = main_checkout(root)
    store = connect(params.tracking, root)
    site = _Site(home, params, store, find(store, keep_last))
    items = [*_worktrees(site), *_work(site), *_downloads(site), *_runs(site)]
    objects, notes = _objects(site, with_remote=with_remote)
    return Plan([*items, *objects], notes)


def told(found: Plan, *, is_dry: bool) -> list[str]:
    """The plan as lines."""
    verb = "would remove" if is_dry else "removed"
    lines = [f"{verb} {item.kind}: {item.name}{_size_text(item.size)}" for item in found.items]
    known = sum(item.size or 0 for item in found.items)
    lines += [f"left alone: {note}" for note in found.notes]
    return [
        *lines,
        f"{len(found.items)} things, {known / 1e6:.1f} MB" if found.items else "nothing to remove",
    ]


def _worktrees(site: _Site) -> Iterator[Item]:
    kept = {run.name for run in site.needs.runs if run.run_id in site.needs.kept}
    for path in sorted((site.root / WORKTREES).glob("*")):
        if path.is_dir() and path.name not in kept and not _is_held(path / layout.STATE / "work"):
            yield Item(
                "worktree", path.name, _size(path), partial(workspace.remove, site.root, path)
            )


def _work(site: _Site) -> Iterator[Item]:
    """Of training runs: those that MLflow knows of (also elsewhere), and what lies here and it does not."""
    needed = {run.work for run in site.needs.runs if run.run_id in site.needs.kept}
    spare = {run.work for run in site.needs.spare if run.work} - needed
    here = site.root / layout.STATE / "work" / "train"
    spare |= {str(p) for p in here.glob("*") if p.is_dir() and str(p.absolute()) not in needed}
    for address in sorted(spare):
        if address.startswith(_S3):
            objects = Objects(address, endpoint_url=site.params.storage.endpoint_url)
            if names := list(objects.names()):
                yield Item("checkpoints", address, None, partial(_delete, objects, names))
        elif Path(address).is_dir() and not _is_locked(Path(address).with_suffix(".lock")):
            yield Item(
                "work directory", address, _size(Path(address)), partial(shutil.rmtree, address)
            )


def _downloads(site: _Site) -> Iterator[Item]:
    for path in sorted((site.root / layout.STATE / "cache" / "runs").glob("*")):
        if path.name not in site.needs.kept:
            yield Item("downloaded run", path.name, _size(path), partial(shutil.rmtree, path))


def _runs(site: _Site) -> Iterator[Item]:
    spare = site.needs.spare
    if spare:
        names = ", ".join(f"{run.name} {run.run_id[:8]}" for run in spare[:8])
        more = f" and {len(spare) - 8} more" if len(spare) > 8 else ""
        yield Item("MLflow runs", f"{names}{more}", None, partial(_remove_runs, site.store, spare))


def _remove_runs(store: Store, runs: Sequence[RunRecord]) -> None:
    remove_runs(store, {run.run_id: run.artifact_uri for run in runs})


def _objects(site: _Site, *, with_remote: bool) -> tuple[list[Item], list[str]]:
    if running := site.needs.running:
        return [], [
            f"DVC's cache and remote, as run {running[0].run_id} ({running[0].name}) is in progress"
        ]
    cache = dvc_objects.ObjectCache.of(site.root).directory
    if not cache.is_relative_to(site.root):
        return [], [
            f"DVC's cache and remote, as others may share the cache at {cache}: see `dvc gc --projects`"
        ]
    notes: list[str] = []
    is_cloud = with_remote and bool(
        dvc_objects.dvc(site.root, "config", "core.remote", may_fail=True).strip()
    )
    if is_cloud and (problem := _fetch_commits(site.root)):
        notes.append(f"DVC's remote, as others' commits cannot be fetched: {problem}")
        is_cloud = False
    command = ["--workspace", "--all-commits", "--all-experiments", "--force"]
    command += ["--cloud"] if is_cloud else []
    output = _dvc_gc(site, [*command, "--dry"])
    gone = [line.removeprefix(_GONE) for line in output.splitlines() if line.startswith(_GONE)]
    if not gone:
        return [], notes
    size = sum(Path(name).stat().st_size for name in gone if Path(name).is_file())
    where = "DVC's cache and remote" if is_cloud else "DVC's cache"
    item = Item("objects", f"{len(gone)} of {where}", size, partial(_collect, site, command))
    return [item], notes


def _collect(site: _Site, arguments: Sequence[str]) -> None:
    _dvc_gc(site, arguments)


def _dvc_gc(site: _Site, arguments: Sequence[str]) -> str:
    """`dvc gc` that also honours what needed runs and other worktrees name."""
    with ExitStack() as stack:
        pins = stack.enter_context(dvc_objects.scratch_project(site.root, {}, with_git=True))
        dvc_objects.write_pointer(
            pins / "pins.dvc", {md5: md5 for md5 in sorted(site.needs.digests)}
        )
        going = {site.root / WORKTREES / item.name for item in _worktrees(site)}
        others = [str(path) for path in _other_worktrees(site.root) if path not in going]
        return dvc_objects.dvc(site.root, "gc", *arguments, "--projects", str(pins), *others)


def _other_worktrees(root: Path) -> list[Path]:
    lines = _git(root, "worktree", "list", "--porcelain").stdout.splitlines()
    paths = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    return [path for path in paths if path != root and (path / layout.DVC_YAML).is_file()]


def _fetch_commits(root: Path) -> str | None:
    """All branches, tags and experiments of all git remotes; what is wrong, if that fails."""
    for remote in _git(root, "remote").stdout.split():
        fetched = _git(root, "fetch", "--tags", remote, f"+refs/heads/*:refs/remotes/{remote}/*")
        if fetched.returncode == 0:
            fetched = _git(root, "fetch", remote, "refs/exps/*:refs/exps/*")
        if fetched.returncode:
            return " ".join(fetched.stderr.split())[:200]
    return None


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def _delete(objects: Objects, names: Sequence[str]) -> None:
    for name in names:
        objects.delete(name)


def _is_held(directory: Path) -> bool:
    return any(_is_locked(lock) for lock in directory.rglob("*.lock"))


def _is_locked(lock: Path) -> bool:
    """Whether a process holds the lease."""
    if not lock.is_file():
        return False
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _size(directory: Path) -> int:
    return sum(
        p.lstat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink()
    )


def _size_text(size: int | None) -> str:
    return "" if size is None else f" ({size / 1e6:.1f} MB)"
