"""Objects of DVC by their digest, without dvc.lock: are they in the cache, and how they get out of cache or remote.

DVC itself runs as a subprocess in a scratch project that shares the checkout's cache and remotes. In the cache a file
lies at files/md5/AB/CDEF...; a directory is a file of JSON whose name ends in `.dir` and that lists its files.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

_DIGEST = re.compile(r"[0-9a-f]{32}(\.dir)?")
_CONFIGS = ("config", "config.local")
_LOCKED = ("Unable to acquire lock", "it is being blocked by")
_OUT = "out"
_IN_REMOTE_ONLY = "deleted"  # how `dvc status --cloud` calls it, from an empty cache


class DvcError(ValueError):
    """DVC cannot do it; the message has its words."""


@dataclass(frozen=True)
class ObjectFile:
    """A file of a directory object: its name in it, and its md5."""

    name: str
    md5: str


@dataclass(frozen=True)
class ObjectCache:
    """A DVC cache directory (`dvc cache dir`)."""

    directory: Path

    @classmethod
    def of(cls, root: Path) -> ObjectCache:
        """The cache of a checkout.

        Raises:
            DvcError: `root` is no DVC project.
        """
        return cls(Path(dvc(root, "cache", "dir").strip().splitlines()[-1]).resolve())

    def path(self, md5: str) -> Path:
        """Where an object lies, if it is there."""
        if not _DIGEST.fullmatch(md5):
            raise DvcError(f"{md5!r} is no digest of DVC")
        return self.directory / "files" / "md5" / md5[:2] / md5[2:]

    def files(self, md5: str) -> list[ObjectFile]:
        """The files of a directory object; a file is itself, under the name "".

        Raises:
            DvcError: the listing is not in the cache or cannot be read.
        """
        if not md5.endswith(".dir"):
            return [ObjectFile("", md5)]
        try:
            listed = json.loads(self.path(md5).read_text())
            return [ObjectFile(str(item["relpath"]), str(item["md5"])) for item in listed]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DvcError(f"{self.path(md5)} lists no files ({error})") from None

    def missing(self, md5: str) -> list[str]:
        """What of an object is not here: digests, the object's own first; [] if all of it is."""
        if not self.path(md5).is_file():
            return [md5]
        try:
            files = self.files(md5)
        except DvcError:
            return [md5]
        return [file.md5 for file in files if not self.path(file.md5).is_file()]


def is_locked(output: str) -> bool:
    """Whether DVC says that another of its commands works in the checkout."""
    return any(text in output for text in _LOCKED)


def advice(output: str) -> str:
    """How to go on where DVC cannot read a file of its own, which a kill or a full disk has cut or a merge has marked."""
    if "RWLock-file" in output:
        return "; remove .dvc/tmp/rwlock when no dvc works there"
    if "dvc.lock" in output:
        return "; take one side's, or remove it: what is in DVC's cache is not run again"
    return ""


def pull(root: Path, md5: str, target: Path) -> None:
    """Bring an object from the cache of the checkout, or else its default remote, to `target`, which must not exist.

    Raises:
        DvcError: it is in neither, or `target` exists.
    """
    if target.exists():
        raise DvcError(f"{target} exists; name another directory")
    with scratch_project(root, {_OUT: md5}) as project:
        result = _run(project, "pull", f"{_OUT}.dvc")
        if result.returncode:  # without a remote, what is in the cache is enough
            checkout = _run(project, "checkout", f"{_OUT}.dvc")
            if checkout.returncode or ObjectCache.of(root).missing(md5):
                raise DvcError(
                    f"DVC object {md5} is neither in the cache of {root} nor in its remote: {_words(result)}"
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(project / _OUT, target)


def missing_in_remote(root: Path, md5: str) -> list[str]:
    """What of an object the default remote of the checkout has not: digests; all of it without a remote.

    Each file is asked for: where the listing of a directory is there, DVC itself takes its files for granted.

    Raises:
        DvcError: the remote does not answer.
    """
    if not dvc(root, "config", "core.remote", may_fail=True).strip():
        return [md5]
    with scratch_project(root, {_OUT: md5}, with_cache=False) as project:
        dvc(project, "status", "--cloud", f"{_OUT}.dvc")  # brings the listing, and nothing else
        cache = ObjectCache.of(project)
        if md5.endswith(".dir") and not cache.path(md5).is_file():
            return [md5]
        digests = sorted({file.md5 for file in cache.files(md5)})
    with scratch_project(root, {}, with_cache=False) as project:
        write_pointer(project / f"{_OUT}.dvc", {digest: digest for digest in digests})
        found = json.loads(dvc(project, "status", "--cloud", "--json", f"{_OUT}.dvc"))
        return [digest for digest in digests if found.get(digest) != _IN_REMOTE_ONLY]


@contextmanager
def scratch_project(
    root: Path, digests: Mapping[str, str], *, with_cache: bool = True, with_git: bool = False
) -> Iterator[Path]:
    """A DVC project with the configuration of `root` (and its cache), in which NAME.dvc stands for each digest.

    `with_git`: an empty repository, without which `dvc gc --all-commits` takes no project along.
    """
    source = root / ".dvc"
    cache = ObjectCache.of(root).directory
    with TemporaryDirectory(prefix="polyturn-dvc-") as directory:
        project = Path(directory)
        (project / ".dvc").mkdir()
        for name in _CONFIGS:
            if (source / name).is_file():
                _copy_config(source / name, project / ".dvc" / name)
        if with_git:
            subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
        else:
            dvc(project, "config", "--local", "core.no_scm", "true")
        if with_cache:
            dvc(project, "cache", "dir", "--local", str(cache))
        else:  # nor what DVC remembers of the remote from the last time
            dvc(project, "config", "--local", "core.site_cache_dir", str(project / "site"))
        for name, md5 in digests.items():
            write_pointer(project / f"{name}.dvc", {name: md5})
        yield project


def write_pointer(path: Path, digests: Mapping[str, str]) -> None:
    """A .dvc file whose outs have these digests."""
    outs = [{"md5": md5, "hash": "md5", "path": name} for name, md5 in digests.items()]
    path.write_text(yaml.safe_dump({"outs": outs}))


def _copy_config(source: Path, target: Path) -> None:
    """Relative paths of remotes, which count from the directory of the file, become absolute."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(source)
    for section in parser.sections():
        url = parser[section].get("url")
        if url and "://" not in url and section.strip("'\"").startswith("remote "):
            parser[section]["url"] = str((source.parent / url).resolve())
    with target.open("w") as file:
        parser.write(file)


def dvc(root: Path, *arguments: str, may_fail: bool = False) -> str:
    """Run DVC in `root`; what it prints.

    Raises:
        DvcError: it failed.
    """
    result = _run(root, *arguments)
    if result.returncode and not may_fail:
        raise DvcError(f"`dvc {' '.join(arguments)}` in {root} failed: {_words(result)}")
    return result.stdout


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def _words(result: subprocess.CompletedProcess[str]) -> str:
    return " ".join((result.stderr or result.stdout).split())[:500]
