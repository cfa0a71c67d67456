"""Fetching over HTTP: bounded in time, bytes, redirects and requests in flight, with retries."""

from __future__ import annotations

import asyncio
import email.utils
import random
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

import aiohttp
from yarl import URL

from polyturn.data.addresses import GuardedResolver, check_scheme, check_url
from polyturn.data.normalise import check_raster
from polyturn.data.quarantine import RowError
from polyturn.data.urls import public_url, quote_url
from polyturn.params import ImagesParams

_REDIRECTS = (301, 302, 303, 307, 308)
_RETRIED = (408, 425, 429)
_CHUNK = 65536


@dataclass(frozen=True)
class Fetched:
    """A body that is a raster image, and how it came."""

    body: bytes = field(repr=False)
    final_url: str
    attempts: int


class _RetryableError(Exception):
    """A failure that another attempt may cure."""

    def __init__(self, reason: str, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.error = RowError(reason, detail)
        self.retry_after_s = retry_after_s


class Fetcher:
    """An HTTP client for images, used as an async context; `served` as in `GuardedResolver`."""

    def __init__(self, limits: ImagesParams, served: Mapping[str, tuple[str, int]]) -> None:
        self._limits = limits
        self._served = dict(served)
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._host_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._jitter = random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Fetcher:
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=limits.concurrency, resolver=GuardedResolver(limits.allow_hosts, self._served)
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.read_timeout_s
            ),
            headers={
                "User-Agent": limits.user_agent,
                "Accept": "image/*,*/*;q=0.5",
                "Accept-Encoding": "identity",
            },
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, url: str) -> Fetched:
        """Fetch one image.

        images.total_timeout_s counts requests and the waits between them, not the wait for a free slot.

        Raises:
            RowError: see "Reasons of a fetch" in quarantine.py; its detail is the same from run to run.
        """
        limits = self._limits
        address = quote_url(url)
        host = urlsplit(address).netloc
        host_slots = self._host_slots.setdefault(host, asyncio.Semaphore(limits.per_host))
        left_s = limits.total_timeout_s
        for attempt in range(limits.retries + 1):
            async with host_slots, self._slots:
                started = time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        body, final_url = await self._follow(address)
                    return Fetched(body, public_url(final_url), attempt + 1)
                except TimeoutError:
                    # The budget is spent: another attempt has no time.
                    raise self._timeout() from None
                except _RetryableError as failure:
                    retry = failure
            left_s -= time.monotonic() - started
            backoff_s = limits.backoff_s * 2**attempt * self._jitter.uniform(0.5, 1.0)
            wait_s = max(retry.retry_after_s, backoff_s)
            if attempt == limits.retries or wait_s >= left_s:
                raise retry.error
            await asyncio.sleep(wait_s)
            left_s -= wait_s
        raise AssertionError("the last attempt returns or raises")

    def _timeout(self) -> RowError:
        return RowError(
            "timeout",
            f"no whole image within images.read_timeout_s {self._limits.read_timeout_s:g} s "
            f"or images.total_timeout_s {self._limits.total_timeout_s:g} s",
        )

    async def _follow(self, url: str) -> tuple[bytes, str]:
        """Follow redirects, each hop checked like the first, and read the last answer."""
        for _ in range(self._limits.max_redirects + 1):
            if urlsplit(url).hostname not in self._served:
                check_url(url, self._limits.allow_hosts)
            answer = await self._request(url)
            if isinstance(answer, bytes):
                return answer, url
            try:
                target = urljoin(url, answer)
                check_scheme(target)
                url = quote_url(target)
            except ValueError as error:
                if isinstance(error, RowError) and error.reason == "blocked_scheme":
                    raise
                raise RowError(
                    "bad_url", f"{urlsplit(url).hostname} redirects to {printable(answer)}"
                ) from None
            check_url(url, self._limits.allow_hosts)
        raise RowError(
            "too_many_redirects", f"more than images.max_redirects {self._limits.max_redirects}"
        )

    async def _request(self, url: str) -> bytes | str:
        """The body, or the address that the server points to."""
        assert self._session is not None, "use Fetcher as an async context"
        try:
            async with self._session.get(URL(url, encoded=True), allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    return location
                self._check_status(response)
                return await self._body(response)
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise _RetryableError("timeout", self._timeout().detail) from None
            raise
        except aiohttp.ClientConnectorDNSError:
            raise _RetryableError("dns", f"{urlsplit(url).hostname} does not resolve") from None
        except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch) as error:
            raise RowError("tls", f"{urlsplit(url).hostname}: {type(error).__name__}") from None
        except (aiohttp.ClientError, OSError, EOFError):
            raise _RetryableError(
                "connection", f"{urlsplit(url).hostname} gave no answer"
            ) from None
        except ValueError as error:
            if isinstance(error, RowError):
                raise
            raise RowError("bad_url", f"{public_url(url)!r} cannot be asked for") from None

    def _check_status(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status == 200:
            return
        detail = f"the server answers {status}"
        if status in _RETRIED or status >= 500:
            wait_s = retry_after_s(response.headers.get("Retry-After"), time.time())
            raise _RetryableError(f"http_{status}", detail, wait_s)
        raise RowError(f"http_{status}", detail)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self._limits.max_bytes
        if (response.content_length or 0) > limit:
            raise RowError(
                "too_large", f"Content-Length {response.content_length}, images.max_bytes {limit}"
            )
        decoder = _Decoder(response.headers.get("Content-Encoding", ""), limit)
        try:
            async for chunk in response.content.iter_chunked(_CHUNK):
                decoder.feed(chunk)
            body = decoder.finish()
        except (aiohttp.ServerTimeoutError, TimeoutError, RowError):
            raise
        except (aiohttp.ClientError, OSError, EOFError):
            raise _RetryableError(
                "short_body", "the connection ended before the body did"
            ) from None
        try:
            check_raster(body)
        except RowError as error:
            kind = printable(response.headers.get("Content-Type", "nothing"))
            said = f"status {response.status}, Content-Type {kind}: {error.detail}"
            raise RowError(error.reason, said) from None
        return body


class _Decoder:
    """Collects a body, undoing gzip or deflate that was not asked for, within a limit of decoded bytes."""

    def __init__(self, encoding: str, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._inflate = None
        name = encoding.strip().lower()
        if name in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47 if name != "deflate" else 15)
        elif name not in ("", "identity"):
            raise RowError(
                "content_encoding", f"Content-Encoding {printable(name)} was not asked for"
            )

    def feed(self, chunk: bytes) -> None:
        if self._inflate is not None:
            try:
                chunk = self._inflate.decompress(chunk, self._limit - self._size + 1)
            except zlib.error as error:
                raise RowError(
                    "content_encoding", f"the compressed body is damaged: {error}"
                ) from None
        self._size += len(chunk)
        if self._size > self._limit:
            raise RowError("too_large", f"more than images.max_bytes {self._limit}")
        self._parts.append(chunk)

    def finish(self) -> bytes:
        if self._inflate is not None and not self._inflate.eof:
            raise RowError("content_encoding", "the compressed body ends early")
        return b"".join(self._parts)


def printable(header: str) -> str:
    """The start of a header that may hold any bytes, as text that can be logged and stored.

    >>> printable("image/png"), printable("caf\\udce9")
    ('image/png', 'caf\\\\udce9')
    """
    return header[:60].encode("ascii", "backslashreplace").decode()


def retry_after_s(header: str | None, now_s: float) -> float:
    """Seconds that a Retry-After header asks for: a number, or an HTTP date; 0 if it says nothing readable."""
    if not header:
        return 0.0
    if re.fullmatch(r"[0-9]+", header.strip()):
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
