"""An HTTP session in an event loop of its own: replies go on arriving while the caller's loop is busy or gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")

# A connection that was idle for longer is not used again: the servers close theirs after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE),
# and a request that meets the closing is lost.
KEEP_ALIVE_S = 2.0


class Wires:
    """A thread that runs a loop with one session; `limit` bounds the requests in flight."""

    def __init__(self, timeout_s: float, max_concurrency: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.limit = asyncio.Semaphore(max_concurrency)
        opening = asyncio.run_coroutine_threadsafe(_session(timeout_s), self._loop)
        self.session = opening.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run a coroutine over there; await the result here. Cancelling it here cancels it there."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine over there and wait for it; not to be called over there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the session, the loop and the thread."""
        asyncio.run_coroutine_threadsafe(self.session.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(timeout_s),
    )
