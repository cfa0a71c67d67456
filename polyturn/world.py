"""The processes of a training run: who owns which group, and how trajectories and errors reach all of them.

Every rank runs the same loop. What ranks exchange here travels over gloo, so that a rank that waits for another one's
environments never sits inside an NCCL kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from polyturn.types import Group, ImageRecord, Message, Problem, Trajectory, Turn

T = TypeVar("T")

# How long a rank waits for another one's sampling; a rank that dies is noticed at once, by its closed connection.
_PATIENCE = timedelta(hours=12)


class RankError(RuntimeError):
    """A rank failed; the message names it and says with what."""


class RankInputError(ValueError):
    """A rank failed by what the user has to mend; the message names it."""


class LostPeerError(RuntimeError):
    """Another rank has gone, so that this one cannot go on; the other one's error is the cause."""


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the other ranks."""

    rank: int
    message: str
    is_input: bool

    def error(self) -> Exception:
        message = f"rank {self.rank}: {self.message}"
        return RankInputError(message) if self.is_input else RankError(message)


@dataclass(frozen=True)
class World:
    """This process's place among the `size` processes of a run; the default is a run of one process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = field(default=None, repr=False)  # gloo; None for one process

    @property
    def is_main(self) -> bool:
        """Whether this rank writes metrics, trajectories, policies and the checkpoint's marker."""
        return self.rank == 0

    def twin(self) -> World:
        """The same ranks with a gloo group of their own, for a thread beside the one that uses this (collective)."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return replace(self, group=group)

    def owns(self, group_index: int) -> bool:
        """Whether this rank samples the group: group index modulo world size."""
        return group_index % self.size == self.rank

    def owned(self, items: Sequence[T]) -> list[T]:
        """This rank's part of a list that all ranks have, by position.

        Rank 1 of 2 owns b and d of a, b, c, d.
        """
        return list(items[self.rank :: self.size])

    def gather(self, groups: Sequence[Group]) -> list[Group]:
        """All ranks' groups in the order of their indices, on every rank (collective).

        Pictures that are held in memory travel once per rank and hash, as PNG bytes; those on disk by path.
        """
        if self.size == 1:
            return sorted(groups, key=lambda group: group.index)
        bare, pictures = _without_pictures(groups)
        parts = self.all_gather((bare, pictures))
        table = {sha256: png for _, held in parts for sha256, png in held.items()}
        whole = [_with_pictures(group, table) for part, _ in parts for group in part]
        return sorted(whole, key=lambda group: group.index)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank (collective); values are pickled.

        Raises:
            LostPeerError: another rank has gone.
        """
        if self.size == 1:
            return [value]
        received: list[T | None] = [None] * self.size
        with _noticing_loss(self.rank):
            dist.all_gather_object(received, value, group=self.group)
        return cast("list[T]", received)

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank (collective).

        Raises:
            LostPeerError: another rank has gone.
        """
        return self.all_gather(value if self.is_main else cast("T", None))[0]

    def barrier(self) -> None:
        """Wait until all ranks are here (collective)."""
        self.all_gather(None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that may fail on some ranks: its error is raised on all of them when the block ends (collective).

        The block itself holds no collective, for a rank that failed would not join it.

        Raises:
            RankInputError, RankError: the block failed on another rank; this rank's own error stays as it is.
        """
        mine: _Failure | None = None
        try:
            yield
        except Exception as error:
            mine = _Failure(self.rank, _told(error), isinstance(error, ValueError))
            self._exchange(mine)
            raise
        for failure in self._exchange(mine):
            if failure is not None:
                raise failure.error()

    def _exchange(self, mine: _Failure | None) -> list[_Failure | None]:
        try:
            return self.all_gather(mine)
        except LostPeerError:
            if mine is None:
                raise
            return []  # this rank has an error of its own to tell


ONE = World()


def is_rank() -> bool:
    """Whether this process was started as one rank of several (torchrun's environment)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(*, with_gpu: bool = True) -> Iterator[World]:
    """The world that torchrun's environment describes; one process where there is none.

    `with_gpu`: each rank takes the GPU of its local number, where the host has GPUs.
    """
    if not is_rank():
        yield ONE
        return
    has_gpu = with_gpu and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        yield World(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group()


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _noticing_loss(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's and the store's own
        raise LostPeerError(
            f"rank {rank} lost contact with another rank: {' '.join(str(error).split())[:300]}"
        ) from None


# -- pictures: taken out before a group travels, put back after -----------------------------------------------


def _without_pictures(groups: Sequence[Group]) -> tuple[list[Group], dict[str, bytes]]:
    pictures: dict[str, bytes] = {}

    def take(image: ImageRecord) -> ImageRecord:
        if image.data is None:
            return image
        pictures[image.sha256] = image.data
        return replace(image, data=None)

    return [_map_images(group, take) for group in groups], pictures


def _with_pictures(group: Group, pictures: Mapping[str, bytes]) -> Group:
    def give(image: ImageRecord) -> ImageRecord:
        held = pictures.get(image.sha256) if image.path is None else None
        return image if held is None else replace(image, data=held)

    return _map_images(group, give)


def _map_images(group: Group, change: Callable[[ImageRecord], ImageRecord]) -> Group:
    problems: dict[int, Problem] = {}

    def message(old: Message) -> Message:
        content = tuple(change(p) if isinstance(p, ImageRecord) else p for p in old.content)
        return replace(old, content=content)

    def problem(old: Problem) -> Problem:
        if id(old) not in problems:  # siblings go on sharing one
            problems[id(old)] = replace(old, messages=tuple(map(message, old.messages)))
        return problems[id(old)]

    def turn(old: Turn) -> Turn:
        shown = None if old.observation is None else message(old.observation)
        return replace(old, observation=shown)

    def trajectory(old: Trajectory) -> Trajectory:
        return replace(
            old,
            problem=problem(old.problem),
            turns=tuple(map(turn, old.turns)),
            images=tuple(map(change, old.images)),
        )

    return replace(group, trajectories=tuple(map(trajectory, group.trajectories)))
