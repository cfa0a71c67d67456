"""Who runs this, also where the system knows no name: a container under a user id of its own has no line in /etc/passwd."""

from __future__ import annotations

import getpass
import os

USER = "POLYTURN_USER"  # variable with the name of the one for whom a worker works
_LOGIN = "LOGNAME"  # where getpass looks first


def login() -> str:
    """The login name; the number of the user where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 has made the one of the other
        return str(os.getuid())


def user() -> str:
    """For whom it is done: POLYTURN_USER, else the login."""
    return os.environ.get(USER) or login()


def give_name() -> None:
    """Let this process and its children find a login name: DVC and torch ask for one and fail where there is none."""
    os.environ.setdefault(_LOGIN, login())
