"""A loopback web server whose every path misbehaves in its own way."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from PIL import Image

Answer = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]


@dataclass
class Web:
    """A running server; `routes` maps decoded paths to answers, `hits` counts requests by path."""

    port: int = 0
    routes: dict[str, Answer] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, path: str, answer: Answer) -> str:
        self.routes[path] = answer
        return self.url + path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = unquote(head[0].split(" ")[1]).partition("?")[0]
            headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
            self.hits[path] += 1
            await self.routes.get(path, reply(b"nothing here", status=404))(
                Request(path, headers), writer
            )
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def reply(
    body: bytes,
    *,
    status: int = 200,
    kind: str = "image/png",
    length: int | None = None,
    **headers: str,
) -> Answer:
    """A plain answer; `length` overrides Content-Length."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append(f"Content-Length: {len(body) if length is None else length}")

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return answer


def png(size: tuple[int, int] = (64, 64), color: object = "red", **options: object) -> bytes:
    """A small PNG of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG", **options)
    return buffer.getvalue()
