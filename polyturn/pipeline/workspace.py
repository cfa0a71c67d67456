"""A checkout to run the pipeline in: params.yaml from recipe plus overrides, and git worktrees of their own."""

from __future__ import annotations

import io
import logging
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from polyturn import layout, params
from polyturn.data.files import atomic_path
from polyturn.params import Params
from polyturn.params_tree import ParamsError, Tree, merge, override, parse_value, read_tree
from polyturn.pipeline.bootstrap import bootstrap
from polyturn.pipeline.checkout import WORKTREES

logger = logging.getLogger(__name__)

RECIPES = Path("recipes")
_OUTPUTS = (str(layout.DVC_LOCK), str(layout.METRICS), str(layout.REGISTERED))


class WorkspaceError(ValueError):
    """A worktree cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """The params of a run: what is laid over params.yaml, and the validated whole."""

    changes: Tree
    params: Params


def recipe_names(root: Path) -> list[str]:
    """Names of the overlays in recipes/, sorted."""
    return sorted(path.stem for path in (root / RECIPES).glob("*.yaml"))


def compose(root: Path, *, recipe: str | None, overrides: Mapping[str, object]) -> Plan:
    """Lay a recipe and dotted overrides over the checkout's params.yaml and validate the result.

    Raises:
        ParamsError: the recipe does not exist, or the result is wrong; the message names recipe or key.
    """
    base = read_tree(root / layout.PARAMS)
    changes: Tree = {}
    if recipe is not None:
        path = root / RECIPES / f"{recipe}.yaml"
        if not path.is_file():
            known = ", ".join(recipe_names(root)) or "none"
            raise ParamsError(f"recipe {recipe!r} is not in {RECIPES}/; known: {known}")
        changes = read_tree(path)
    changes = override(changes, overrides)
    origin = " + ".join(
        ["params.yaml", *([recipe] if recipe else []), *(["overrides"] if overrides else [])]
    )
    return Plan(changes, params.parse(merge(base, changes), origin=origin))


def parse_pairs(pairs: Sequence[str]) -> dict[str, object]:
    """Read `section.key=VALUE` pairs; a value is YAML, so 3, 1e-5, true, null and [1, 2] are what they look like.

    What looks like a number and is none, such as a commit, is quoted: model.revision='1234e5'.

    Raises:
        ParamsError: a pair has no `=`, or its value is no YAML.
    """
    overrides: dict[str, object] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ParamsError(f"an override is written section.key=VALUE, got {pair!r}")
        try:
            overrides[name] = parse_value(value)
        except yaml.YAMLError:
            raise ParamsError(f"override {name}: {value!r} is not valid YAML") from None
    return overrides


def write_params(root: Path, changes: Mapping[str, object]) -> None:
    """Lay `changes` over the checkout's params.yaml; comments and order stay."""
    path = root / layout.PARAMS
    editor = YAML()
    editor.width = 110
    editor.indent(mapping=2, sequence=4, offset=2)
    editor.Representer = _Representer
    document = editor.load(path.read_text())
    _update(document, changes)
    text = io.StringIO()
    editor.dump(document, text)
    with atomic_path(path) as partial:
        partial.write_text(text.getvalue())


class _Representer(RoundTripRepresenter):
    """Writes null as `null`, and floats so that YAML 1.1 readers see numbers: 1.0e-05, not 1e-05."""


def _represent_float(representer: RoundTripRepresenter, value: float) -> object:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_none(representer: RoundTripRepresenter, value: None) -> object:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(float, _represent_float)
_Representer.add_representer(type(None), _represent_none)


def _update(document: MutableMapping[str, object], changes: Mapping[str, object]) -> None:
    for key, value in changes.items():
        old = document.get(key)
        if isinstance(old, MutableMapping) and isinstance(value, Mapping):
            _update(cast("MutableMapping[str, object]", old), cast("Mapping[str, object]", value))
        else:
            document[key] = value


def require_committed(root: Path) -> None:
    """Make sure that a worktree of the current commit holds all that `root` does.

    Raises:
        WorkspaceError: `root` has uncommitted edits, which would silently not be part of the run.
    """
    if edits := uncommitted(root):
        shown = ", ".join(edits[:5]) + (f" and {len(edits) - 5} more" if len(edits) > 5 else "")
        raise WorkspaceError(
            f"a run in a worktree of its own starts from a commit, and {shown} is not committed; "
            "commit or stash it, or run here with `make demo`"
        )


def create(
    root: Path, name: str, changes: Mapping[str, object], *, revision: str | None = None
) -> Path:
    """Make a git worktree of the current commit (or `revision`) with `changes` in its params.yaml; return its path.

    One of the same name, which a failed run has left, is replaced. It shares the DVC cache with
    `root` (see `polyturn.pipeline.bootstrap`).

    Raises:
        WorkspaceError: no revision is named and `root` has uncommitted edits, the revision is unknown, or git fails.
    """
    if revision is None:
        require_committed(root)
    path = add_worktree(root, name, revision or "HEAD")
    write_params(path, changes)
    bootstrap(path)
    return path


def add_worktree(root: Path, name: str, revision: str) -> Path:
    """Make a git worktree of a commit as it is, in place of one of the same name; see `create` and `resolve`.

    Raises:
        WorkspaceError: the revision is unknown, or git fails.
    """
    path = root / WORKTREES / name
    commit = revision if revision == "HEAD" else resolve(root, revision)
    _git(root, "worktree", "prune")
    if path.exists():
        remove(root, path)
    # Hooks of the user's (dvc install, pre-commit) are for work by hand, and one that fails fails the command. Forced
    # twice: of an earlier one a lock may be left.
    add = ["-c", "core.hooksPath=/dev/null", "worktree", "add", "--force", "--force"]
    _git(root, *add, "--quiet", "--detach", str(path), commit)
    if (path / ".gitmodules").is_file():  # a new worktree has their directories, empty
        update = ["-c", "core.hooksPath=/dev/null", "submodule", "update", "--init"]
        _git(path, *update, "--recursive", "--quiet")
    return path


def resolve(root: Path, revision: str) -> str:
    """The commit of a branch, tag or commit; what `root` does not know is fetched from its remotes first.

    A branch of a remote goes before the local one of that name, which may be behind.

    Raises:
        WorkspaceError: neither knows it.
    """
    names = (f"refs/remotes/origin/{revision}", revision)
    if _commit(root, *names[1:]) != revision:  # not a whole commit id that is here already
        _fetch(root)
    if (found := _commit(root, *names) or _fetched(root, revision)) is None:
        raise WorkspaceError(
            f"revision {revision!r} is no branch, tag or commit that {root} or its remotes know; push it first"
        )
    return found


def _commit(root: Path, *names: str) -> str | None:
    for name in names:
        command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def _fetch(root: Path) -> None:
    try:
        _git(root, "fetch", "--all", "--quiet")
    except WorkspaceError as error:  # what is here may do
        logger.warning("%s", error)


def _fetched(root: Path, revision: str) -> str | None:
    """What a remote has by that name and a plain fetch does not bring, as in a clone of one branch or of some depth."""
    for remote in _git(root, "remote").split():
        try:
            _git(root, "fetch", "--quiet", "--", remote, revision)
        except WorkspaceError as error:
            logger.debug("%s", error)
        else:
            return _commit(root, "FETCH_HEAD")
    return None


def remove(root: Path, path: Path) -> None:
    """Remove a worktree with everything in it, also one that git knows no more (half made, or its checkout was moved)."""
    try:
        _git(root, "worktree", "remove", "--force", "--force", str(path))
    except WorkspaceError as error:
        logger.info("%s", error)
        shutil.rmtree(path)
        _git(root, "worktree", "prune")


def require_repository(root: Path) -> None:
    """Make sure that git reads `root` as a repository, without which DVC does not work and no commit can be named.

    Raises:
        WorkspaceError: git is not there, or refuses; or `root` is a download without its history.
    """
    try:
        _git(root, "rev-parse", "--git-dir")
    except WorkspaceError as error:
        if "not a git repository" not in str(error):
            raise
        raise WorkspaceError(
            f"{root} is no git repository (a downloaded archive?), and DVC needs one: clone the project, or make one here "
            "with `git init && git add . && git commit --message start`"
        ) from None


def uncommitted(root: Path) -> list[str]:
    """Paths with edits that are not committed; the pipeline's own outputs do not count."""
    lines = _git(root, "-c", "core.quotePath=false", "status", "--porcelain").splitlines()
    return [name for line in lines if (name := line[3:]) not in _OUTPUTS]


def _git(root: Path, *arguments: str) -> str:
    return _run(["git", *arguments], root)


def _run(command: Sequence[str], root: Path) -> str:
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise WorkspaceError(
            f"{error.filename} is not there: install {command[0]}, or put it into PATH"
        ) from None
    if result.returncode:
        raise WorkspaceError(
            f"`{' '.join(command)}` in {root} failed: {' '.join(result.stderr.split())}"
        )
    return result.stdout
