"""Which addresses may be fetched from (case IMG-23 and its kind)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest

from polyturn.data.addresses import GuardedResolver, check_url, is_public
from polyturn.data.quarantine import RowError
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply

BLOCKED = [
    "127.0.0.1",
    "127.255.0.9",
    "0.0.0.0",
    "10.0.0.5",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "::127.0.0.1",
]


@pytest.mark.parametrize("text", BLOCKED)
def test_private_addresses_are_blocked_in_every_range(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_pass(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "[fe80::1]",
    ],
)
def test_numeric_hosts_are_refused_in_every_spelling(web: Web, stage: Stage, host: str) -> None:
    good = web.add("/good.png", reply(png()))
    with pytest.raises(RowError, match="blocked_address"):
        check_url(f"http://{host}:{web.port}/good.png", ())
    if host == "127.0.0.1":
        return  # the one spelling that the stage's allow_hosts opens below
    done = stage.run({"bad": f"http://{host}:{web.port}/good.png", "good": good})
    assert done.set_aside["bad"].reason == "blocked_address"
    assert web.hits["/good.png"] == 1


@pytest.mark.parametrize("url", ["ftp://a.test/x", "gopher://a.test/x", "javascript:alert(1)"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(RowError, match="blocked_scheme"):
        check_url(url, ())


def test_a_redirect_to_a_private_address_is_refused(web: Web, stage: Stage) -> None:
    for name, target in {
        "numeric": f"http://2130706433:{web.port}/secret.png",
        "metadata": "http://169.254.169.254/latest/",
        "file": "file:///etc/hostname",
        "named": f"http://localhost:{web.port}/secret.png",
    }.items():
        web.add(f"/{name}.png", reply(b"", status=302, Location=target))
    web.add("/secret.png", reply(png()))
    good = web.add("/good.png", reply(png(color="blue")))
    names = ("numeric", "metadata", "file", "named")
    done = stage.run({"good": good, **{name: f"{web.url}/{name}.png" for name in names}})
    reasons = {name: row.reason for name, row in done.set_aside.items()}
    assert reasons == {
        "numeric": "blocked_address",
        "metadata": "blocked_address",
        "named": "blocked_address",
        "file": "blocked_scheme",
    }
    assert web.hits["/secret.png"] == 0


def _resolve(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[str]], allow: tuple[str, ...] = ()
) -> list[list[str]]:
    """What the resolver hands to the client for successive DNS answers."""
    calls = iter(answers)

    async def run() -> list[list[str]]:
        loop = asyncio.get_running_loop()

        async def fake(host: str, port: int, **_: object) -> list[object]:
            return [(socket.AF_INET, 1, 6, "", (address, port)) for address in next(calls)]

        monkeypatch.setattr(loop, "getaddrinfo", fake)
        resolver = GuardedResolver(allow, {"figures.test": ("127.0.0.1", 4711)})
        return [[item["host"] for item in await resolver.resolve("host.test", 80)] for _ in answers]

    return asyncio.run(run())


def test_the_client_connects_to_exactly_the_checked_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _resolve(monkeypatch, [["8.8.8.8", "1.1.1.1"]]) == [["8.8.8.8", "1.1.1.1"]]
    # A name that turns private between two look-ups, or has one private address among public ones.
    for answers in ([["8.8.8.8"], ["127.0.0.1"]], [["8.8.8.8", "10.0.0.1"]]):
        with pytest.raises(RowError, match="blocked_address"):
            _resolve(monkeypatch, answers)


def test_allowed_hosts_may_be_private(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _resolve(monkeypatch, [["10.0.0.1"]], ("host.test",)) == [["10.0.0.1"]]
    assert _resolve(monkeypatch, [["10.0.0.1"]], ("host.test:80",)) == [["10.0.0.1"]]
    with pytest.raises(RowError, match="allow_hosts"):
        _resolve(monkeypatch, [["10.0.0.1"]], ("host.test:8080",))


def test_the_served_host_leads_to_the_loopback_server() -> None:
    resolver = GuardedResolver((), {"figures.test": ("127.0.0.1", 4711)})
    [result] = asyncio.run(resolver.resolve("figures.test", 80))
    assert (result["host"], result["port"]) == ("127.0.0.1", 4711)
