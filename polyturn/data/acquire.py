"""The bytes of one image source, from wherever it lies: HTTP, S3, data: URI or the dataset's pictures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from polyturn.data.cache import Body, FetchCache
from polyturn.data.fetching import Fetcher
from polyturn.data.files import inside
from polyturn.data.normalise import sniff
from polyturn.data.quarantine import RowError
from polyturn.data.s3 import ObjectStore
from polyturn.data.urls import cache_key, declared_type, decode_data_uri, public_url
from polyturn.params import ImagesParams

_PASSING = (
    "timeout",
    "connection",
    "dns",
    "short_body",
    "http_408",
    "http_425",
    "http_429",
    "http_5",
)


@dataclass
class Acquirer:
    """Gets bodies, each URL once: cached ones from disk, requests for the same address shared."""

    limits: ImagesParams
    pictures: Path
    cache: FetchCache
    fetcher: Fetcher
    log: TextIO
    counts: Counter[str] = field(default_factory=Counter[str])
    _in_flight: dict[str, asyncio.Future[Body]] = field(
        default_factory=dict[str, "asyncio.Future[Body]"]
    )

    _s3: ObjectStore | None = None
    _s3_lock: threading.Lock = field(default_factory=threading.Lock)

    async def get(self, source: str) -> Body:
        """The bytes of an image source.

        Raises:
            RowError: it cannot be had; reasons are listed in quarantine.py.
            S3AccessError: no S3 object can be had with these credentials.
        """
        scheme = source.partition(":")[0].lower() if ":" in source else ""
        if scheme == "data":
            body = self._within_limit(decode_data_uri(source))
            if declared_type(source) != f"image/{sniff(body.data).lower()}":
                self.counts["wrong_types"] += 1
            return body
        if scheme in ("http", "https", "s3"):
            return await self._once(source, is_s3=scheme == "s3")
        return self._within_limit(self._read_picture(source))

    def _within_limit(self, data: bytes) -> Body:
        if len(data) > self.limits.max_bytes:
            raise RowError(
                "too_large", f"{len(data)} bytes, images.max_bytes {self.limits.max_bytes}"
            )
        self.counts["bytes"] += len(data)
        return Body(data, hashlib.sha256(data).hexdigest())

    def _read_picture(self, name: str) -> bytes:
        path = inside(self.pictures, name)
        if path is None:
            raise RowError("blocked_path", f"{name[:200]!r} leads out of the dataset")
        if not path.is_file():
            raise RowError("missing_file", f"{name[:200]!r} does not exist in the dataset")
        if path.stat().st_size > self.limits.max_bytes:
            raise RowError(
                "too_large",
                f"{path.stat().st_size} bytes, images.max_bytes {self.limits.max_bytes}",
            )
        return path.read_bytes()

    async def _once(self, url: str, *, is_s3: bool) -> Body:
        key = cache_key(url)
        while key in self._in_flight:
            # Who asked first may fail with an error of its own; then the cache or another try decides.
            await asyncio.wait([self._in_flight[key]])
        cached = self._cached(key)
        if cached is not None:
            return cached
        future = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            return await self._fetch(url, key, is_s3=is_s3)
        finally:
            del self._in_flight[key]
            future.cancel()

    def _cached(self, key: str) -> Body | None:
        try:
            body = self.cache.get(key)
        except RowError:
            self.counts["cache_hits"] += 1
            raise
        if body is not None:
            self.counts["cache_hits"] += 1
            self._note(key, cache="hit", bytes=len(body.data))
        return body

    async def _fetch(self, url: str, key: str, *, is_s3: bool) -> Body:
        started = time.monotonic()
        try:
            if is_s3:
                data, final_url, attempts = await asyncio.to_thread(self._read_s3, url), key, 1
            else:
                fetched = await self.fetcher.fetch(url)
                data, final_url, attempts = fetched.body, fetched.final_url, fetched.attempts
        except RowError as error:
            self.counts["fetch_failures"] += 1
            if not error.reason.startswith(_PASSING):
                self.cache.put_failure(key, error)
            self._note(key, reason=error.reason, seconds=round(time.monotonic() - started, 4))
            raise
        self.counts["fetched"] += 1
        self.counts["bytes"] += len(data)
        seconds = round(time.monotonic() - started, 4)
        self._note(key, final_url=final_url, attempts=attempts, seconds=seconds, bytes=len(data))
        return self.cache.put(key, data)

    def _read_s3(self, uri: str) -> bytes:
        """Read one object, in a thread; the first makes the client."""
        with self._s3_lock:
            if self._s3 is None:
                self._s3 = ObjectStore(self.limits)
        return self._s3.read(uri, max_bytes=self.limits.max_bytes)

    def _note(self, key: str, **what: object) -> None:
        self.log.write(json.dumps({"url": public_url(key), **what}, ensure_ascii=False) + "\n")
