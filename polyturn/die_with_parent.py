"""Run a command that gets SIGTERM when its parent dies: `python -m polyturn.die_with_parent PARENT COMMAND ...`.

The mark (PR_SET_PDEATHSIG) survives exec. It is set by a process of its own, not between fork and exec of the parent,
where other threads may hold locks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(argv: Sequence[str]) -> list[str]:
    """`argv` as a command that dies with this process."""
    return [sys.executable, "-m", "polyturn.die_with_parent", str(os.getpid()), *argv]


def main(arguments: Sequence[str]) -> None:
    """Set the mark and become the command."""
    parent, *argv = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the mark was set
        sys.exit(1)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
