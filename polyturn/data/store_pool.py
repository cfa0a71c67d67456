"""Pictures into the store beside the event loop: in a thread for a few, in child processes for many.

Decoding in threads of this process would hold the interpreter lock against the event loop and the database. A
picture that ends a decoder (a crash inside a codec, memory) costs its own row and a new process, not the run.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import loads
from types import TracebackType
from typing import cast

from polyturn.data.outcome import ImageOutcome
from polyturn.data.storing import LENGTH, Picture, frame, store_image
from polyturn.params import ImagesParams

_IN_THREAD = 256  # pictures; a process takes as long to start as these take
_BATCH = 16  # pictures that go to a process together
_BATCH_BYTES = 1_000_000


class _DecoderDiedError(Exception):
    """A child process ended in the middle of a batch."""


@dataclass(frozen=True)
class _Waiting:
    picture: Picture
    outcome: asyncio.Future[ImageOutcome]


class StorePool:
    """Normalises and stores pictures, used as an async context; images.num_processes 0 keeps all in a thread."""

    def __init__(self, limits: ImagesParams, png_dir: Path) -> None:
        self._limits = limits
        self._png_dir = png_dir
        self._thread = ThreadPoolExecutor(1, "store")
        self._num_seen = 0
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> StorePool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._thread.shutdown()

    async def store(self, picture: Picture) -> ImageOutcome:
        """The outcome of one picture; its PNG is in place when this returns.

        Raises:
            OSError: no child process can be started.
        """
        self._num_seen += 1
        loop = asyncio.get_running_loop()
        if not self._limits.num_processes or self._num_seen <= _IN_THREAD:
            arguments = (picture, self._limits, self._png_dir)
            return await loop.run_in_executor(self._thread, store_image, *arguments)
        if not self._workers:
            self._workers = [
                asyncio.create_task(_Worker(self._limits, self._png_dir, self._queue).work())
                for _ in range(self._limits.num_processes)
            ]
        waiting = _Waiting(picture, loop.create_future())
        self._queue.put_nowait(waiting)
        return await waiting.outcome


class _Worker:
    """One child process at a time, fed from the queue."""

    def __init__(self, limits: ImagesParams, png_dir: Path, queue: asyncio.Queue[_Waiting]) -> None:
        self._limits = limits
        self._png_dir = png_dir.resolve()
        self._queue = queue
        self._process: Process | None = None

    async def work(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                batch = [await self._queue.get()]
                size = len(batch[0].picture.data)
                while len(batch) < _BATCH and size < _BATCH_BYTES and not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                    size += len(batch[-1].picture.data)
                await self._answer(batch)
        finally:
            await self._end()

    async def _answer(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = await self._store([waiting.picture for waiting in batch])
        except OSError as error:
            for waiting in batch:
                _fail(waiting, error)
            return
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if not waiting.outcome.done():
                waiting.outcome.set_result(outcome)

    async def _store(self, pictures: list[Picture]) -> list[ImageOutcome]:
        try:
            return await self._ask(pictures)
        except _DecoderDiedError:
            if len(pictures) == 1:
                return [_fatal(pictures[0])]
        # One of them is to blame; alone it shows itself.
        return [outcome for one in pictures for outcome in await self._store([one])]

    async def _ask(self, pictures: list[Picture]) -> list[ImageOutcome]:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame(pictures))
            await process.stdin.drain()
            head = await process.stdout.readexactly(LENGTH.size)
            body = await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except (ConnectionError, asyncio.IncompleteReadError):
            await self._end()
            raise _DecoderDiedError from None
        return cast("list[ImageOutcome]", loads(body))

    async def _start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "polyturn.data.storing", stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(frame((self._limits, self._png_dir)))
        return self._process

    async def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _fail(waiting: _Waiting, error: OSError) -> None:
    if not waiting.outcome.done():
        waiting.outcome.set_exception(error)


def _fatal(picture: Picture) -> ImageOutcome:
    known = ImageOutcome(picture.shown, source_sha256=picture.sha256)
    return replace(
        known,
        reason="corrupt",
        detail="decoding it ends the decoder's process",
        source_bytes=len(picture.data),
    )
