"""What all unit tests share: policies, which are built once (a test that changes weights copies them first), and a feigned NFS."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from polyturn.policy.model import Policy
    from polyturn.render import Renderer

# torch and transformers take seconds to import: only tests that use a policy pay for them.


@pytest.fixture(scope="session")
def policy() -> Policy:
    """A Qwen3-VL with random weights."""
    from tests.unit import tiny  # noqa: PLC0415

    return tiny.qwen3()


@pytest.fixture(scope="session")
def policy_2_5() -> Policy:
    """A Qwen2.5-VL with random weights."""
    from tests.unit import tiny  # noqa: PLC0415

    return tiny.qwen2_5()


@pytest.fixture(scope="session")
def renderer(policy: Policy) -> Renderer:
    """The renderer of `policy`."""
    from polyturn.render import Renderer  # noqa: PLC0415

    return Renderer(policy)


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files called `held` are as on NFS while a program reads them: their directory cannot be removed, but renamed."""
    rmtree = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False, **how: object) -> None:
        if not list(Path(path).rglob("held")):
            rmtree(path, ignore_errors, **how)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
