"""Fetching from a server that misbehaves (cases IMG-20 to IMG-35 and their kinds)."""

from __future__ import annotations

import asyncio
import gzip
import struct
import time
import zlib

import pytest

from polyturn.data.cache import FetchCache
from polyturn.data.fetching import retry_after_s
from polyturn.data.quarantine import RowError
from tests.unit.data.stage import Stage
from tests.unit.data.web import Answer, Request, Web, png, reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n"


def _drip(chunk: bytes, pause_s: float, head: bytes = HEAD) -> Answer:
    """Endless: a chunk after every pause."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"\r\n")
        while not writer.is_closing():
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


def _in_turn(*answers: Answer) -> Answer:
    """One answer after the other; the last one stays."""
    left = list(answers)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return answer


async def _reset_mid_body(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 5000\r\n\r\n" + png()[:40])
    await writer.drain()
    sock = writer.get_extra_info("socket")
    sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: close sends a reset
    writer.close()


async def _drop(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_an_endless_body_is_cut_at_the_byte_limit(web: Web, stage: Stage) -> None:
    """IMG-20."""
    endless = web.add("/endless.png", _drip(png()[:40] + b"\0" * 100_000, 0.0))
    good = web.add("/good.png", reply(png()))
    done = stage.run({"endless": endless, "good": good}, max_bytes=2_000_000)
    assert done.kept == ["good"]
    assert done.set_aside["endless"].reason == "too_large"
    assert web.hits["/endless.png"] == 1


def test_a_drip_behind_a_redirect_ends_at_the_total_time_limit(web: Web, stage: Stage) -> None:
    """IMG-21."""
    web.add("/drip.png", _drip(b"\x89", 0.05))
    start = web.add("/start.png", reply(b"", status=302, Location="/drip.png"))
    good = {f"good{i}": web.add(f"/{i}.png", reply(png(color=(i, 0, 0)))) for i in range(20)}
    began = time.monotonic()
    done = stage.run({"slow": start, **good}, total_timeout_s=1.0)
    assert time.monotonic() - began < 3
    assert done.set_aside["slow"].reason == "timeout"
    assert len(done.kept) == 20


def test_a_silent_server_ends_at_the_read_time_limit(web: Web, stage: Stage) -> None:
    async def silent(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    url = web.add("/silent.png", silent)
    good = web.add("/good.png", reply(png()))
    began = time.monotonic()
    done = stage.run({"a": url, "good": good}, read_timeout_s=0.2, retries=1)
    assert time.monotonic() - began < 3
    assert done.set_aside["a"].reason == "timeout"
    assert web.hits["/silent.png"] == 2


@pytest.mark.parametrize("kind", ["text/html", "image/jpeg", "image/png"])
def test_a_page_instead_of_a_picture_is_described_not_dumped(
    web: Web, stage: Stage, kind: str
) -> None:
    """IMG-26."""
    page = b"<!DOCTYPE html>" + b"<p>We will be back soon</p>" * 50
    url = web.add("/fig.jpg", reply(page, kind=kind))
    good = web.add("/good.png", reply(png()))
    row = stage.run({"page": url, "good": good}).set_aside["page"]
    assert row.reason == "not_an_image"
    assert all(word in row.detail for word in (url, "status 200", kind, "html"))
    assert "back soon" not in row.detail
    with FetchCache(stage.root / "cache") as cache:
        assert cache.get(good) is not None
        with pytest.raises(RowError, match="not_an_image"):
            cache.get(url)


def test_the_user_agent_is_ours_and_a_true_403_is_asked_once(web: Web, stage: Stage) -> None:
    """IMG-27."""

    async def picky(request: Request, writer: asyncio.StreamWriter) -> None:
        known = request.headers.get("User-Agent") == "me/1"
        await (reply(png()) if known else reply(b"", status=403))(request, writer)

    open_url = web.add("/picky.png", picky)
    shut = web.add("/shut.png", reply(b"", status=403))
    done = stage.run({"picky": open_url, "shut": shut}, user_agent="me/1")
    assert done.kept == ["picky"]
    assert done.set_aside["shut"].reason == "http_403"
    assert web.hits["/shut.png"] == 1


def test_letters_and_spaces_in_a_path_and_their_escapes_are_one_address(
    web: Web, stage: Stage
) -> None:
    """IMG-29."""
    raw = web.add("/фиг/三角 1.png", reply(png()))
    escaped = web.url + "/%D1%84%D0%B8%D0%B3/%E4%B8%89%E8%A7%92%201.png"
    done = stage.run({"raw": raw, "escaped": escaped, "lower": escaped.lower()})
    assert done.kept == ["raw", "escaped", "lower"]
    assert web.hits == {"/фиг/三角 1.png": 1}


def test_empty_and_short_bodies_never_reach_the_store(web: Web, stage: Stage) -> None:
    """IMG-35."""
    body = png()
    done = stage.run(
        {
            "empty": web.add("/empty.png", reply(b"")),
            "short": web.add("/short.png", reply(body, length=len(body) + 100)),
            "reset": web.add("/reset.png", _reset_mid_body),
            "good": web.add("/good.png", reply(png(color="blue"))),
        }
    )
    assert done.kept == ["good"]
    reasons = {name: row.reason for name, row in done.set_aside.items()}
    assert reasons == {"empty": "empty_body", "short": "short_body", "reset": "short_body"}
    assert len(list((done.out / "png").iterdir())) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_passing_failures_are_tried_again(web: Web, stage: Stage, status: int) -> None:
    url = web.add("/a.png", _in_turn(reply(b"", status=status), reply(png())))
    assert stage.run({"a": url}).kept == ["a"]
    assert web.hits["/a.png"] == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418, 204, 206])
def test_lasting_failures_are_asked_once(web: Web, stage: Stage, status: int) -> None:
    url = web.add("/a.png", reply(b"", status=status))
    good = web.add("/good.png", reply(png()))
    assert stage.run({"a": url, "good": good}).set_aside["a"].reason == f"http_{status}"
    assert web.hits["/a.png"] == 1


def test_retries_end_and_dropped_connections_count_as_failures(web: Web, stage: Stage) -> None:
    done = stage.run(
        {
            "busy": web.add("/busy.png", reply(b"", status=503)),
            "drop": web.add("/drop.png", _drop),
            "good": web.add("/good.png", reply(png())),
        },
        retries=2,
    )
    assert done.set_aside["busy"].reason == "http_503"
    assert done.set_aside["drop"].reason == "connection"
    assert web.hits["/busy.png"] == 3
    # The client repeats a request by itself where a kept connection may have gone stale.
    assert 3 <= web.hits["/drop.png"] <= 6


def test_retry_after_is_honoured_within_the_time_limit(web: Web, stage: Stage) -> None:
    busy = {"status": 429, "Retry_After": "1"}
    url = web.add("/a.png", _in_turn(reply(b"", **busy), reply(png())))
    began = time.monotonic()
    assert stage.run({"a": url}).kept == ["a"]
    assert time.monotonic() - began >= 1


def test_a_retry_after_beyond_the_time_limit_is_not_waited_for(web: Web, stage: Stage) -> None:
    url = web.add("/a.png", reply(b"", status=429, Retry_After="3600"))
    good = web.add("/good.png", reply(png()))
    assert stage.run({"a": url, "good": good}).set_aside["a"].reason == "http_429"
    assert web.hits["/a.png"] == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", 0.0),
        ("-3", 0.0),
    ],
)
def test_retry_after_by_hand(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, now_s=10.0) == seconds


def test_redirect_loops_end_and_short_chains_arrive(web: Web, stage: Stage) -> None:
    loop = web.add("/loop.png", reply(b"", status=302, Location="/loop.png"))
    web.add("/c.png", reply(png()))
    web.add("/b.png", reply(b"", status=308, Location="c.png"))
    chain = web.add("/a.png", reply(b"", status=301, Location=f"{web.url}/b.png"))
    done = stage.run({"loop": loop, "chain": chain}, max_redirects=2)
    assert done.kept == ["chain"]
    assert done.set_aside["loop"].reason == "too_many_redirects"
    assert web.hits["/loop.png"] == 3


def _raw(head: bytes, body: bytes = b"") -> Answer:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"\r\nConnection: close\r\n\r\n" + body)

    return answer


@pytest.mark.parametrize(
    "location",
    [b"http://127.0.0.1:99999/x.png", b"http://h:port/x.png", b"http://[::1/x.png", b"http://]/x.png", b"http://h\xe9/"],
)  # fmt: skip
def test_a_redirect_to_no_address_sets_one_row_aside(
    web: Web, stage: Stage, location: bytes
) -> None:
    """ArchiveTeam/wpull#197 and cowrie#40509: an address that cannot be parsed ended the whole stage."""
    odd = web.add("/odd.png", _raw(b"HTTP/1.1 302 Found\r\nLocation: " + location))
    done = stage.run({"odd": odd, "good": web.add("/good.png", reply(png()))})
    assert done.kept == ["good"]
    assert done.set_aside["odd"].reason == "bad_url"


def test_a_redirect_in_latin_1_is_followed_as_it_came(web: Web, stage: Stage) -> None:
    """aio-libs/aiohttp#10047: Location with raw bytes that are not UTF-8."""
    web.add("/caf\ufffd.png", reply(png()))  # what the test server's unquote makes of %E9
    away = web.add("/away.png", _raw(b"HTTP/1.1 302 Found\r\nLocation: /caf\xe9.png"))
    assert stage.run({"away": away}).kept == ["away"]


def test_headers_of_any_bytes_set_one_row_aside(web: Web, stage: Stage) -> None:
    kind = _raw(b"HTTP/1.1 200 OK\r\nContent-Type: \xff\xfe\r\nContent-Length: 5", b"hello")
    coded = _raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: \xff\r\nContent-Length: 5", b"hello")
    later = _raw("HTTP/1.1 429 X\r\nRetry-After: \u00b2\r\nContent-Length: 0".encode())
    sources = {"kind": kind, "coded": coded, "later": later, "good": reply(png())}
    done = stage.run({name: web.add(f"/{name}.png", answer) for name, answer in sources.items()})
    assert done.kept == ["good"]
    assert {name: row.reason for name, row in done.set_aside.items()} == {
        "kind": "not_an_image", "coded": "content_encoding", "later": "http_429",
    }  # fmt: skip


def test_compressed_bodies_are_undone_within_the_byte_limit(web: Web, stage: Stage) -> None:
    bomb = gzip.compress(b"\0" * 20_000_000)
    zipped = gzip.compress(png())
    deflated = zlib.compress(png())
    done = stage.run(
        {
            "bomb": web.add("/bomb.png", reply(bomb, Content_Encoding="gzip")),
            "zipped": web.add("/zipped.png", reply(zipped, Content_Encoding="gzip")),
            "deflated": web.add("/deflated.png", reply(deflated, Content_Encoding="deflate")),
            "cut": web.add("/cut.png", reply(zipped[:-20], Content_Encoding="gzip")),
            "odd": web.add("/odd.png", reply(png(), Content_Encoding="br")),
        },
        max_bytes=1_000_000,
    )
    assert done.kept == ["zipped", "deflated"]
    reasons = {name: row.reason for name, row in done.set_aside.items()}
    assert reasons == {"bomb": "too_large", "cut": "content_encoding", "odd": "content_encoding"}


def test_a_content_length_beyond_the_limit_is_refused_unread(web: Web, stage: Stage) -> None:
    url = web.add("/big.png", reply(b"\x89PNG", length=10**9))
    good = web.add("/good.png", reply(png()))
    assert stage.run({"big": url, "good": good}).set_aside["big"].reason == "too_large"


@pytest.mark.parametrize("limit", ["concurrency", "per_host"])
def test_requests_in_flight_are_bounded(web: Web, stage: Stage, limit: str) -> None:
    running = peak = 0

    async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02)
        running -= 1
        await reply(png())(request, writer)

    urls = {str(i): web.add(f"/{i}.png", slow) for i in range(30)}
    assert len(stage.run(urls, **{limit: 3}).kept) == 30
    assert peak == 3


@pytest.mark.slow
def test_two_thousand_urls_of_a_hostile_server_end_in_bounded_time(web: Web, stage: Stage) -> None:
    bomb = gzip.compress(b"\0" * 5_000_000)
    hostile: dict[str, tuple[Answer, str]] = {
        "drip": (_drip(b"\x89", 0.1), "timeout"),
        "reset": (_reset_mid_body, "short_body"),
        "long": (reply(png(), length=len(png()) + 50), "short_body"),
        "page": (reply(b"<html>no</html>", kind="image/png"), "not_an_image"),
        "loop": (reply(b"", status=302, Location="/loop/0.png"), "too_many_redirects"),
        "bomb": (reply(bomb, Content_Encoding="gzip"), "too_large"),
        "endless": (_drip(png()[:40] + b"\0" * 60_000, 0.0), "too_large"),
        "gone": (reply(b"", status=410), "http_410"),
        "broken": (reply(b"", status=500), "http_500"),
        "cut": (reply(png()[:-15]), "truncated"),
    }
    web.add("/loop/0.png", hostile["loop"][0])
    sources: dict[str, str | list[str]] = {}
    expected: dict[str, str] = {}
    kinds = list(hostile)
    for i in range(2000):
        name = f"r{i:04d}"
        if i % 5 == 0:
            kind = kinds[i // 5 % len(kinds)]
            answer, expected[name] = hostile[kind]
            sources[name] = web.add(f"/{kind}/{i}.png", answer)
        elif i % 50 == 1:
            answer = _in_turn(
                reply(b"", status=429, Retry_After="0"),
                reply(png((32, 32), (i % 256, i // 256, 0))),
            )
            sources[name] = web.add(f"/busy/{i}.png", answer)
        else:
            sources[name] = web.add(f"/{i}.png", reply(png((32, 32), (i % 256, i // 256, 0))))
    began = time.monotonic()
    done = stage.run(sources, total_timeout_s=2.0, max_bytes=200_000, max_redirects=3, per_host=32)
    assert time.monotonic() - began < 60
    assert {name: row.reason for name, row in done.set_aside.items()} == expected
    assert done.kept == [name for name in sources if name not in expected]
