"""What a run ran on: commit, uncommitted diff, versions of everything installed, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NAMED_PACKAGES = ("torch", "transformers", "mlflow", "prefect", "dvc", "numpy", "pillow")


@dataclass(frozen=True)
class Environment:
    """The circumstances of a run; `commit` is None outside a git repository, `diff` is "" for a clean tree."""

    commit: str | None
    branch: str | None
    diff: str
    untracked: tuple[str, ...]
    python: str
    platform: str
    cpu_model: str
    num_cpus: int
    packages: dict[str, str]  # distribution -> version, sorted

    def named_versions(self) -> dict[str, str]:
        """Versions of the packages that results depend on most."""
        return {name: self.packages[name] for name in NAMED_PACKAGES if name in self.packages}


def capture(root: Path) -> Environment:
    """Look at the repository that `root` lies in, the interpreter and the machine."""
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return Environment(
        commit=commit(root),
        branch=branch.strip() if branch else None,
        diff=_git(root, "diff", "HEAD") or "",
        untracked=tuple(untracked.splitlines()),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_model=_cpu_model(),
        num_cpus=_num_cpus(),
        packages=installed_packages(),
    )


def commit(root: Path) -> str | None:
    """The commit that is checked out at `root`; None outside a git repository."""
    found = _git(root, "rev-parse", "HEAD")
    return found.strip() if found else None


def installed_packages() -> dict[str, str]:
    """Every installed distribution (normalised name) and its version, sorted by name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
