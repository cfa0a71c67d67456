"""What a preflight check looks at, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyturn.params import Params

Outcome = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class Finding:
    """What a check found, in one line; `fix` says what to do where it failed.

    `may_pass`: the failure may end by itself, as that of a server which does not answer now.
    """

    check: str
    outcome: Outcome
    detail: str
    fix: str = ""
    may_pass: bool = False


@dataclass(frozen=True)
class Site:
    """What checks look at: the checkout and its params."""

    root: Path
    params: Params


Check = Callable[[Site], Finding]
