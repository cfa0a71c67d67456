"""tasks.ranks: which of several ranks' errors is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from polyturn.world import LostPeerError, RankError, RankInputError
from tasks import ranks


def leave(
    work: Path, rank: int, message: str, *, at: float, code: int = 1, lost: bool = False
) -> None:
    content = {"exit_code": code, "message": message, "is_lost_peer": lost, "at": at}
    (work / f"rank_{rank}.json").write_text(json.dumps(content))


def test_the_earliest_error_is_told_with_its_rank(tmp_path: Path) -> None:
    leave(tmp_path, 0, "later", at=2.0)
    leave(tmp_path, 1, "data.path: absent", at=1.0, code=2)
    error = ranks._first_failure(tmp_path, {0: 1, 1: 2})
    assert isinstance(error, RankInputError)
    assert str(error) == "rank 1: data.path: absent"


def test_an_error_that_travelled_names_the_rank_it_comes_from_once(tmp_path: Path) -> None:
    leave(tmp_path, 0, "rank 1: KeyError: 'x'", at=1.0)
    assert str(ranks._first_failure(tmp_path, {0: 1})) == "rank 1: KeyError: 'x'"


def test_losing_another_rank_is_never_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, 0, "lost contact", at=1.0, lost=True)
    leave(tmp_path, 1, "RuntimeError: out of memory", at=2.0)
    error = ranks._first_failure(tmp_path, {0: 1, 1: 1})
    assert isinstance(error, RankError)
    assert str(error) == "rank 1: RuntimeError: out of memory"


def test_a_killed_rank_is_the_cause_and_those_that_the_agent_ended_are_not(tmp_path: Path) -> None:
    leave(tmp_path, 0, "lost contact", at=1.0, lost=True)
    codes = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}
    assert str(ranks._first_failure(tmp_path, codes)) == "rank 1 was ended by SIGKILL"


def test_a_rank_that_left_no_word_is_named_with_its_log(tmp_path: Path) -> None:
    told = str(ranks._first_failure(tmp_path, {1: 3}))
    assert told == "rank 1 ended with exit code 3; see .polyturn/logs/train_rank1.log"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (LostPeerError("gone"), True),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"),
            True,
        ),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_the_loss_of_a_rank_is_recognised(error: Exception, is_lost: bool) -> None:
    assert ranks._is_lost_peer(error) == is_lost
