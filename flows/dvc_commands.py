"""DVC's commands, run for a checkout: what leaves it and what comes into it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from polyturn import layout


class DvcError(RuntimeError):
    """A command of DVC failed; the message holds its own."""


def run(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run `dvc ARGUMENTS` in `root`; its output.

    Raises:
        DvcError: it failed.
    """
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise DvcError(f"`dvc {' '.join(arguments)}` in {root} failed: {said}")
    return done.stdout


def default_remote(root: Path) -> str | None:
    """The name of the remote that `dvc push` uses; None: there is none."""
    found = subprocess.run(
        [sys.executable, "-m", "dvc", "config", "core.remote"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def bring(root: Path, paths: Sequence[str]) -> None:
    """Put outs that dvc.lock names into place, from the cache or the default remote.

    Raises:
        DvcError: neither has them.
    """
    if paths:
        run(root, "pull" if default_remote(root) else "checkout", *paths)


def cached_outs(root: Path, stage: str) -> list[str]:
    """The stage's outs that DVC's cache holds."""
    return [path for path, is_cached in _outs(_stages(root)[stage]).items() if is_cached]


def plain_outs(root: Path) -> list[str]:
    """The outs of all stages that are files of git, not of DVC's cache."""
    outs = [_outs(stage) for stage in _stages(root).values()]
    return [path for found in outs for path, is_cached in found.items() if not is_cached]


def inputs(root: Path, stage: str) -> list[str]:
    """The outs in DVC's cache that the stage depends on."""
    stages = _stages(root)
    deps = {str(dep) for dep in cast("Sequence[object]", stages[stage].get("deps", ()))}
    return [path for name in stages for path in cached_outs(root, name) if path in deps]


def _stages(root: Path) -> Mapping[str, Mapping[str, object]]:
    document = yaml.safe_load((root / layout.DVC_YAML).read_text())
    return cast("Mapping[str, Mapping[str, object]]", document["stages"])


def _outs(stage: Mapping[str, object]) -> dict[str, bool]:
    """Paths of outs, metrics and plots, each with whether it is cached."""
    found: dict[str, bool] = {}
    for kind in ("outs", "metrics", "plots"):
        for entry in cast("Sequence[object]", stage.get(kind, ())):
            if isinstance(entry, Mapping):
                for path, options in cast("Mapping[str, Mapping[str, object]]", entry).items():
                    found[path] = bool(options.get("cache", True))
            else:
                found[str(entry)] = True
    return found
