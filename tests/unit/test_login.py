"""Names of users, also of those who have none."""

from __future__ import annotations

import getpass
import os
import pwd

import pytest

from polyturn import environment, login


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under `--user 12345`."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", login.USER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("nameless")
def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow/mlflow#1103, apache/airflow#9963: `getpwuid(): uid not found` in a container."""
    assert login.login() == login.user() == str(os.getuid())
    monkeypatch.setenv(login.USER, "ada")
    assert (login.login(), login.user()) == (str(os.getuid()), "ada")


@pytest.mark.usefixtures("nameless")
def test_what_dvc_and_torch_ask_for_is_there_in_every_process_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in environment.SETTINGS:
        monkeypatch.setenv(name, "before")  # put back at the end, as the name is
    monkeypatch.setenv("LOGNAME", "before")
    monkeypatch.delenv("LOGNAME")
    with pytest.raises(KeyError):
        getpass.getuser()
    environment.apply()
    assert getpass.getuser() == str(os.getuid())
