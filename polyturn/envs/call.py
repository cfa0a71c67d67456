"""Calls an environment's method, synchronous or not, under a time limit of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable


async def call(
    method: Callable[..., object], *args: object, time_limit_s: float, **kwargs: object
) -> object:
    """Call `method` and await what it returns, if that can be awaited.

    A plain function runs in a daemon thread of its own: its limit starts at once, however many others run, and
    one that never returns holds up neither the others nor the end of the process. Coroutines of all environments
    run in one event loop of their own, in a daemon thread too: one that never gives up control, or that ignores
    being cancelled, holds up other asynchronous environments but not the rollout.

    Raises:
        TimeoutError: it takes longer than `time_limit_s`.
        RuntimeError: it raised something that must not pass through the event loop (StopIteration, SystemExit).
    """
    async with asyncio.timeout(time_limit_s):
        if inspect.iscoroutinefunction(method):
            return await _in_env_loop(lambda: method(*args, **kwargs))
        answer = await _in_thread(lambda: method(*args, **kwargs))
        return await _in_env_loop(lambda: answer) if inspect.isawaitable(answer) else answer


async def _in_thread(function: Callable[[], object]) -> object:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def deliver(answer: object, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((answer, error))

    def work() -> None:
        answer, error = None, None
        try:
            answer = function()
        except BaseException as raised:  # handed to the caller below
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, answer, error)

    threading.Thread(target=work, daemon=True).start()
    answer, error = await outcome
    return _result(answer, error)


async def _in_env_loop(start: Callable[[], Awaitable[object]]) -> object:
    """Await `start()` in the environments' loop; leaving early cancels it there without waiting for its end."""

    async def work() -> tuple[object, BaseException | None]:
        try:
            return await start(), None
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # handed to the caller below
            return None, raised

    running = asyncio.run_coroutine_threadsafe(work(), _env_loop())
    try:
        answer, error = await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the environment cancelled its own coroutine") from None
    return _result(answer, error)


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
