"""What a checkout needs before DVC runs in it, the same for worktrees, reproduced runs, experiments and fresh clones.

MLflow's database, train.work_uri and relative data are found by `polyturn.pipeline.checkout` at run time, so that params.yaml stays
as it is; what DVC itself must be told stands in .dvc/config.local, which git does not carry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from polyturn import layout, params
from polyturn.params import StorageParams
from polyturn.pipeline.checkout import main_checkout

REMOTE = "storage"  # what DVC calls storage.url
_LOCAL = Path(".dvc/config.local")


class BootstrapError(ValueError):
    """DVC refused a setting; the message holds its own."""


def bootstrap(path: Path) -> None:
    """Tell DVC in `path`, a worktree or checkout, of the shared cache and of storage.url as default remote.

    A worktree first gets the main checkout's own local settings, such as a remote's endpoint.

    Raises:
        BootstrapError: DVC refuses.
        ParamsError: params.yaml is wrong.
    """
    main = main_checkout(path)
    storage = params.load(path / layout.PARAMS).storage
    if main != path.resolve():
        if (main / _LOCAL).is_file():
            shutil.copy(main / _LOCAL, path / _LOCAL)
        _dvc(path, "cache", "dir", "--local", str(cache_dir(main)))
    if storage.url is not None:
        _set_remote(path, storage.url, storage)


def command_environment() -> dict[str, str]:
    """Variables for `dvc` and stages: this interpreter is the `python` of dvc.yaml."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def cache_dir(root: Path) -> Path:
    """The directory of DVC's cache, absolute."""
    return Path(_dvc(root, "cache", "dir").strip().splitlines()[-1]).resolve()


def default_remote(root: Path) -> str | None:
    """The URL of the remote that `dvc push` uses; None without one."""
    name = _dvc(root, "config", "core.remote", is_required=False).strip()
    return _dvc(root, "config", f"remote.{name}.url").strip() if name else None


def _set_remote(path: Path, url: str, storage: StorageParams) -> None:
    _dvc(path, "remote", "add", "--local", "--force", "--default", REMOTE, url)
    if storage.endpoint_url:
        _dvc(path, "remote", "modify", "--local", REMOTE, "endpointurl", storage.endpoint_url)


def _dvc(root: Path, *arguments: str, is_required: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and is_required:
        raise BootstrapError(
            f"`dvc {' '.join(arguments)}` in {root} failed: {' '.join(done.stderr.split())}"
        )
    return done.stdout
