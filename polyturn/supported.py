"""What params can say and this version cannot do."""

from __future__ import annotations

from polyturn.params import Params, ParamsError


def check_supported(chosen: Params) -> None:
    """Refuse what params can say and this version cannot do, before any stage does work.

    Raises:
        ParamsError: the message names the key, its value and what to use.
    """
    for key, value, known in (("learner.backend", chosen.learner.backend, "fsdp"),):
        if value != known:
            raise ParamsError(f"{key}: {value} is not in this version of polyturn; use {known}")
