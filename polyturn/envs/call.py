"""Calls an environment's methods, synchronous or not, each under a time limit of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import cast

logger = logging.getLogger(__name__)

Outcome = tuple[object, BaseException | None]


class Caller:
    """Calls the methods of one environment, and awaits what they return if that can be awaited.

    Plain functions run in one daemon thread, which is the environment's own: a browser, a database or a renderer
    serves only the thread that opened it. A limit starts at once, however many other environments run, and a function
    that never returns holds up neither them nor the end of the process: the thread is left to it, and the next call
    has a new one. Coroutines of all environments run in one event loop of their own, in a daemon thread too: one that
    never gives up control, or that ignores being cancelled, holds up other asynchronous environments but not the
    rollout.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    async def call(
        self,
        method: Callable[..., object],
        *args: object,
        time_limit_s: float,
        on_late: Callable[[object], object] | None = None,
    ) -> object:
        """Call `method`. What a plain function returns when nobody waits for it any more goes to `on_late`.

        Raises:
            TimeoutError: it takes longer than `time_limit_s`.
            RuntimeError: it raised something that must not pass through the event loop (StopIteration, SystemExit).
        """
        async with asyncio.timeout(time_limit_s):
            if inspect.iscoroutinefunction(method):
                return await _in_env_loop(lambda: cast("Awaitable[object]", method(*args)))
            answer = await self._in_thread(lambda: method(*args), on_late)
            if not inspect.isawaitable(answer):
                return answer
            return await _in_env_loop(lambda: cast("Awaitable[object]", answer))

    def end(self) -> None:
        """Let the thread go; a later call starts another."""
        if self._worker is not None:
            self._worker.tasks.put(None)
        self._worker = None

    async def _in_thread(
        self, function: Callable[[], object], on_late: Callable[[object], object] | None
    ) -> object:
        self._worker = worker = self._worker or _Worker()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()

        def late(answer: object) -> None:
            if on_late is not None:
                worker.tasks.put(functools.partial(on_late, answer))
            worker.tasks.put(None)

        def deliver(answer: object, error: BaseException | None) -> None:
            if outcome.done():
                late(answer)
            else:
                outcome.set_result((answer, error))

        def work() -> None:
            answer, error = None, None
            try:
                answer = function()
            except BaseException as raised:  # handed to the caller below
                error = raised
            try:
                loop.call_soon_threadsafe(deliver, answer, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                late(answer)

        worker.tasks.put(work)
        try:
            answer, error = await outcome
        except asyncio.CancelledError:
            self._worker = None
            if not outcome.cancelled():  # it had just come
                late(outcome.result()[0])
            raise
        return _result(answer, error)


class _Worker:
    """A daemon thread that does one task after the other; None ends it."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            task()


def awaited(answer: object) -> object:
    """An answer, or what comes of it if it is a coroutine; waits for it, so not to be called by a coroutine of an env."""
    if not inspect.isawaitable(answer):
        return answer
    running = asyncio.run_coroutine_threadsafe(
        _outcome(lambda: cast("Awaitable[object]", answer)), _env_loop()
    )
    return _result(*running.result())


def discard(env: object) -> None:
    """Close an environment that no trajectory uses; a failure is a warning."""
    try:
        close = getattr(env, "close", None)
        if callable(close):
            awaited(close())
    except Exception as error:  # nothing depends on it any more
        logger.warning("an environment that is not used could not be closed: %r", error)


async def _in_env_loop(start: Callable[[], Awaitable[object]]) -> object:
    """Await `start()` in the environments' loop; leaving early cancels it there without waiting for its end."""
    running = asyncio.run_coroutine_threadsafe(_outcome(start), _env_loop())
    try:
        answer, error = await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the environment cancelled its own coroutine") from None
    return _result(answer, error)


async def _outcome(start: Callable[[], Awaitable[object]]) -> Outcome:
    try:
        return await start(), None
    except asyncio.CancelledError:
        raise
    except BaseException as raised:  # handed to the caller of whom it is the outcome
        return None, raised


@functools.cache
def _env_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _result(answer: object, error: BaseException | None) -> object:
    if error is None:
        return answer
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        raise error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error
