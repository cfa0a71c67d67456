"""The doctor at the start of training: it decides whether a run begins, not what it computes.

So its modules are no deps of the stage, and a change of theirs makes no policy stale: it is loaded by name, which the
closure of imports does not see.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from polyturn.pipeline.doctor import StartReport

logger = logging.getLogger(__name__)

_DOCTOR = "polyturn.pipeline.doctor"


class PreflightError(ValueError):
    """A check is red and doctor.allow does not name it; the message is the red lines, each with its fix."""


class NoAnswerError(ConnectionError):
    """All that is red are servers that do not answer now: worth a retry."""


class _Doctor(Protocol):
    def at_start(self, root: Path) -> StartReport: ...


def check() -> None:
    """Run the checks of this checkout that take no model.

    Raises:
        ParamsError: see `polyturn.pipeline.doctor.site_of`.
        PreflightError: something is red.
        NoAnswerError: only servers are.
    """
    report = cast("_Doctor", import_module(_DOCTOR)).at_start(Path.cwd())
    if not report.is_healthy:
        error = NoAnswerError if report.may_pass else PreflightError
        raise error(f"preflight:\n{report.text}\nmend it, or name the check in doctor.allow")
    for line in report.text.splitlines():  # those that doctor.allow names
        logger.warning("preflight: %s", line)
