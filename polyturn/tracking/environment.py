"""What a run ran on: commit, uncommitted diff, versions of everything installed, machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from polyturn import layout
from polyturn.tracking import machine

logger = logging.getLogger(__name__)

_MAX_UNTRACKED_BYTES = (
    1_000_000  # a file that git does not know yet and is larger is named, not kept
)
_CODE = (".py", ".yaml", ".yml", ".toml", ".json", ".jinja", ".md", ".txt", ".sh", ".cfg", ".ini")
_GIT_S = 60  # of one call
_OUTPUTS = (
    layout.DVC_LOCK,
    layout.METRICS,
    layout.REGISTERED,
)  # the pipeline's own, recorded elsewhere
# A diff that `git apply` takes, whatever the user's settings say of diffs for the eye.
_PLAIN_DIFF = (
    "-c", "core.quotePath=false", "diff", "--cached", "--binary", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/",
    "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short",
)  # fmt: skip
# Line ends that git would warn of are no obstacle, and a file that cannot be read is none for the others.
_ADD_ALL = ("-c", "core.safecrlf=false", "add", "--all", "--ignore-errors")
NAMED_PACKAGES = ("torch", "transformers", "mlflow", "prefect", "dvc", "numpy", "pillow")


@dataclass(frozen=True)
class Environment:
    """The circumstances of a run; `commit` is None outside a git repository, `diff` is "" for a clean tree.

    `diff` is from the commit to the working tree as `git apply` takes it, with the text files that git does not know
    yet. `untracked` are all files of that kind, also those that are no text or too large for it.
    """

    commit: str | None
    branch: str | None
    diff: str
    untracked: tuple[str, ...]
    python: str
    platform: str
    cpu_model: str
    num_cpus: int
    gpus: tuple[machine.Gpu, ...]
    packages: dict[str, str]  # distribution -> version, sorted
    sources: dict[str, str]  # distribution -> address, of those that are from no index

    def requirements(self) -> str:
        """All that is installed as pip reads it (what `pip freeze` prints)."""
        lines = [
            f"{name} @ {self.sources[name]}" if name in self.sources else f"{name}=={version}"
            for name, version in self.packages.items()
        ]
        return "".join(f"{line}\n" for line in lines)

    def named_versions(self) -> dict[str, str]:
        """Versions of the packages that results depend on most."""
        return {name: self.packages[name] for name in NAMED_PACKAGES if name in self.packages}


def capture(root: Path) -> Environment:
    """Look at the repository that `root` lies in, the interpreter and the machine.

    A repository that git refuses to read, and edits that it cannot take up, are warned of.
    """
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if branch is None and (refusal := _refusal(root)):
        logger.warning("neither commit nor diff of %s is recorded: %s", root, refusal)
    untracked = _untracked(root)
    return Environment(
        commit=commit(root),
        branch=branch.strip() if branch else None,
        diff=_diff(root, untracked),
        untracked=tuple(untracked),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_model=machine.cpu_model(),
        num_cpus=machine.num_cpus(),
        gpus=machine.gpus(),
        packages=installed_packages(),
        sources=_sources(),
    )


def commit(root: Path) -> str | None:
    """The commit that is checked out at `root`; None outside a git repository."""
    found = _git(root, "rev-parse", "HEAD")
    return found.strip() if found else None


def installed_packages() -> dict[str, str]:
    """Every installed distribution (normalised name) and its version, sorted by name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        head = _head(distribution)
        if name := _normal_name(head):
            found.setdefault(name, head.get("Version", ""))
    return dict(sorted(found.items()))


def _head(distribution: metadata.Distribution) -> dict[str, str]:
    """The fields of a distribution; `distribution.metadata` parses the description behind them too, which takes longer."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    lines = text.partition("\n\n")[0].splitlines()
    return {
        name: value.strip() for name, colon, value in (x.partition(":") for x in lines) if colon
    }


def _normal_name(head: Mapping[str, str]) -> str:
    return head.get("Name", "").lower().replace("_", "-")


def _sources() -> dict[str, str]:
    """What was installed from a directory, an archive or a repository, and from where (PEP 610)."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("direct_url.json")
        if text:
            record = json.loads(text)
            version = record.get("vcs_info", {})
            address = (
                f"{version['vcs']}+{record['url']}@{version['commit_id']}"
                if version
                else record["url"]
            )
            found[_normal_name(_head(distribution))] = address
    return dict(sorted(found.items()))


def _untracked(root: Path) -> list[str]:
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    return [name for name in listed.split("\0") if name and Path(name) not in _OUTPUTS]


def _diff(root: Path, untracked: list[str]) -> str:
    """From the commit to the working tree, with new files of code; git's own index and objects stay as they are."""
    found = _git(root, "rev-parse", "--git-path", "index", "--git-path", "objects")
    if commit(root) is None or found is None:
        return ""
    index, objects = (root / line for line in found.splitlines())
    left_out = [*map(str, _OUTPUTS), *(name for name in untracked if not _is_code(root / name))]
    with TemporaryDirectory() as directory:
        env = {
            "GIT_INDEX_FILE": f"{directory}/index",
            "GIT_OBJECT_DIRECTORY": directory,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.resolve()),
        }
        if index.is_file():
            # With its time, by which git knows that files of the same second may have changed since.
            shutil.copy2(index, f"{directory}/index")
        excluded = [f":(exclude,literal,top){name}" for name in left_out]
        added = _run(root, *_ADD_ALL, "--", ":/", *excluded, env=env)
        diff = _run(root, *_PLAIN_DIFF, "HEAD", env=env)
        for done in (added, diff):
            if done.returncode:
                logger.warning("the recorded diff of %s is not whole: %s", root, _said(done))
        return _text(diff)


def _is_code(path: Path) -> bool:
    """Text that a run may depend on; not data, and not what people keep their passwords in."""
    return path.suffix in _CODE and path.is_file() and path.stat().st_size <= _MAX_UNTRACKED_BYTES


def _refusal(root: Path) -> str | None:
    """Why git does not read the repository that `root` lies in; None where it does, or where there is none."""
    if not any((parent / ".git").exists() for parent in (root.resolve(), *root.resolve().parents)):
        return None
    done = _run(root, "rev-parse", "--git-dir")
    return _said(done) if done.returncode else None


def _git(root: Path, *arguments: str) -> str | None:
    done = _run(root, *arguments)
    return None if done.returncode else _text(done)


def _run(
    root: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git; one that cannot be run, or takes too long, has failed with the reason."""
    command = ["git", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **(env or {})},
            capture_output=True,
            check=False,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 1, b"", str(error).encode())


def _text(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stdout.decode(errors="surrogateescape")  # files need not be UTF-8


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(done.stderr.decode(errors="replace").split())[:500]
