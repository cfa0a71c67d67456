"""What went wrong in a stage, as one line and an exit code."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

USER_ERROR = 2  # the same command would fail again: not worth a retry
FAILURE = 1
TERMINATED = 143  # 128 + SIGTERM
INTERRUPTED = 130  # 128 + SIGINT


class Terminated(SystemExit):
    """SIGTERM arrived."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended; `message` is empty when it ended well."""

    exit_code: int
    message: str

    @property
    def is_retryable(self) -> bool:
        """Whether the same command may succeed next time."""
        return self.exit_code not in (USER_ERROR, TERMINATED, INTERRUPTED)


def explain(error: BaseException) -> Outcome:
    """The outcome that an exception leads to; the message names cause and, where known, the fix."""
    if isinstance(error, Terminated):
        return Outcome(TERMINATED, "ended by SIGTERM")
    if isinstance(error, KeyboardInterrupt):
        return Outcome(INTERRUPTED, "interrupted")
    if isinstance(error, SystemExit):
        return Outcome(error.code if isinstance(error.code, int) else FAILURE, f"exit {error.code}")
    if isinstance(error, ValueError):
        return Outcome(USER_ERROR, str(error) or type(error).__name__)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    return Outcome(FAILURE, f"{type(error).__name__}: {_one_line(error)}")


def _explain_os_error(error: OSError) -> Outcome:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or Path.cwd()
        return Outcome(
            USER_ERROR, f"the disk is full ({where}); free some space, finished stages are kept"
        )
    if error.errno == errno.EADDRINUSE:
        return Outcome(
            USER_ERROR,
            f"a port is in use ({_one_line(error)}); end the program that listens there or "
            "choose another port",
        )
    return Outcome(FAILURE, f"{type(error).__name__}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
