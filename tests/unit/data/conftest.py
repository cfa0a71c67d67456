"""Fixtures of the data tests: a misbehaving web server and the images stage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.data.stage import Stage
from tests.unit.data.web import Web


@pytest.fixture
def web() -> Iterator[Web]:
    """The server, in a thread of its own."""
    server = Web()
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        return listener

    async def stop() -> None:
        listener.close()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # closed connections leave the loop
        loop.stop()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(stop(), loop)
    thread.join(10)
    loop.close()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """The images stage under tmp_path."""
    return Stage(tmp_path)
