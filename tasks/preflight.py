"""The doctor at the start of training, in a process of its own: it decides whether a run begins, not what it computes.

So its modules are no deps of the stage, and a change of theirs makes no policy stale.
"""

from __future__ import annotations

import logging
import subprocess
import sys

logger = logging.getLogger(__name__)


class PreflightError(ValueError):
    """A check is red and doctor.allow does not name it; the message is the red lines, each with its fix."""


def check() -> None:
    """Run the checks of this checkout that take no model.

    Raises:
        PreflightError: something is red.
    """
    command = [sys.executable, "-m", "polyturn.cli", "doctor", "--at-start"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        red = done.stdout.strip() or done.stderr.strip()
        raise PreflightError(f"preflight:\n{red}\nmend it, or name the check in doctor.allow")
    for line in done.stdout.strip().splitlines():  # those that doctor.allow names
        logger.warning("preflight: %s", line)
