"""polyturn.world: who owns what, and what ranks of real processes get from each other."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyturn.types import Group, ImageRecord, Message, Problem, StopReason, Trajectory, Turn
from polyturn.world import ONE, LostPeerError, RankError, RankInputError, World
from tests.unit import ranks

PNG = b"\x89PNG of an environment"


def group(index: int, *, drawn: bytes = PNG) -> Group:
    """Two siblings: a picture of the problem on disk, and one that the environment drew."""
    on_disk = ImageRecord("a" * 64, 16, 16, path=Path("/data/a.png"))
    made = ImageRecord.from_png(drawn, 8, 8)
    problem = Problem(f"p{index}", "train", (Message("user", (on_disk, "Find x.")),), "3")
    turns = (
        Turn((1, 2), (-0.5, -0.25), "hi", Message("tool", (made, "a crop"))),
        Turn((3,), (-0.125,), "x", None),
    )
    one = Trajectory(
        problem=problem,
        group_index=index,
        sibling=0,
        turns=turns,
        token_ids=np.arange(5, dtype=np.int64) + index,
        loss_mask=np.array([0, 1, 1, 0, 1], dtype=np.int8),
        logprobs=np.array([0, -0.5, -0.25, 0, -0.125], dtype=np.float32),
        images=(on_disk, made),
        stop_reason=StopReason.ENV_DONE,
        policy_version=4,
        reward=1.0,
    )
    return Group(index, (one, replace(one, sibling=1)))


def test_groups_are_owned_by_index_modulo_size() -> None:
    second = World(1, 3)
    assert [index for index in range(8) if second.owns(index)] == [1, 4, 7]
    assert second.owned("abcdefgh") == ["b", "e", "h"]
    assert not second.is_main


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_item_is_owned_by_one_rank_as_its_group_is(count: int, size: int) -> None:
    items = list(range(count))
    parts = [World(rank, size).owned(items) for rank in range(size)]
    assert sorted(item for part in parts for item in part) == items
    assert all(World(rank, size).owns(item) for rank, part in enumerate(parts) for item in part)


def test_one_process_gives_back_what_it_has() -> None:
    groups = [group(2), group(0)]
    assert ONE.gather(groups) == [groups[1], groups[0]]
    assert ONE.all_gather(3) == [3]
    assert ONE.broadcast("x") == "x"
    ONE.barrier()
    with pytest.raises(KeyError), ONE.together():
        raise KeyError("own")


def gather_everything(world: World) -> tuple[list[Group], list[int], str, int]:
    """Three groups over two ranks; returns what this rank got, and the bytes that it sent."""
    groups = world.gather([group(index) for index in range(3) if world.owns(index)])
    told = world.broadcast(f"from {world.rank}")
    world.barrier()
    return groups, world.all_gather(world.rank), told, world.size


def test_every_rank_gets_every_group_whole(tmp_path: Path) -> None:
    for rank in ranks.run("tests.unit.test_world:gather_everything", tmp_path):
        assert isinstance(rank.outcome, tuple), rank.output
        groups, numbers, told, size = rank.outcome
        assert (numbers, told, size) == ([0, 1], "from 0", 2)
        assert [g.index for g in groups] == [0, 1, 2]
        for index, found in enumerate(groups):
            wanted = group(index)
            for ours, theirs in zip(found.trajectories, wanted.trajectories, strict=True):
                assert ours.problem == theirs.problem
                assert (ours.sibling, ours.reward, ours.turns) == (
                    theirs.sibling,
                    1.0,
                    theirs.turns,
                )
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.logprobs.dtype == np.float32
                assert ours.images[0].path == Path("/data/a.png")
                assert ours.images[1].read() == PNG
                shown = ours.turns[0].observation
                assert shown is not None
                assert shown.images[0].read() == PNG
            assert found.trajectories[0].problem is found.trajectories[1].problem


def test_a_picture_travels_once_however_often_it_is_shown() -> None:
    import pickle  # noqa: PLC0415

    from polyturn.world import _without_pictures  # noqa: PLC0415

    big = os.urandom(50_000)
    bare, pictures = _without_pictures([group(index, drawn=big) for index in range(4)])
    assert list(pictures.values()) == [big]
    assert 50_000 < len(pickle.dumps((bare, pictures))) < 60_000


def fail_on_rank_1(world: World) -> list[Exception]:
    """What this rank sees of two errors on rank 1, the user's and the program's, one after the other."""
    seen: list[Exception] = []
    for error in (ValueError("data.path: absent"), KeyError("x")):
        try:
            with world.together():
                if world.rank == 1:
                    raise error
        except (ValueError, KeyError, RankError) as raised:
            seen.append(raised)
    return seen


def test_an_error_of_one_rank_is_raised_on_all_with_its_number(tmp_path: Path) -> None:
    first, second = (
        rank.outcome for rank in ranks.run("tests.unit.test_world:fail_on_rank_1", tmp_path)
    )
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [type(error) for error in first] == [RankInputError, RankError]
    assert [str(error) for error in first] == ["rank 1: data.path: absent", "rank 1: KeyError: 'x'"]
    assert [type(error) for error in second] == [ValueError, KeyError]


def die_on_rank_1(world: World) -> None:
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    first, second = ranks.run("tests.unit.test_world:die_on_rank_1", tmp_path, timeout_s=60)
    assert second.exit_code == -signal.SIGKILL
    assert isinstance(first.outcome, LostPeerError), first.output
    assert "rank 0 lost contact" in str(first.outcome)
