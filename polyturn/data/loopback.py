"""A small HTTP server on 127.0.0.1 for pictures of the dataset, so that image URLs are really fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from polyturn.data.files import inside


@asynccontextmanager
async def serve_directory(root: Path) -> AsyncIterator[tuple[str, int]]:
    """Serve the files under `root` on a free port; gives (address, port)."""

    async def picture(request: web.Request) -> web.Response:
        path = inside(root, request.match_info["name"])
        if path is None or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type="application/octet-stream")

    application = web.Application()
    application.router.add_get("/{name:.+}", picture)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address, port = runner.addresses[0][:2]
        yield str(address), int(port)
    finally:
        await runner.cleanup()
