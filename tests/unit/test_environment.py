"""The environment that every command of the project runs under."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import requests

from polyturn import environment

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
BYPASS = ("NO_PROXY", "no_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *(name.lower() for name in PROXIES), *BYPASS):
        monkeypatch.setenv(name, "before")  # put back at the end, whatever becomes of it
        monkeypatch.delenv(name)


@pytest.fixture
def address() -> Iterator[str]:
    """A server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("given", ["", "intranet.example.org, 10.0.0.0/8"])
def test_servers_of_this_machine_are_reached_whatever_proxy_is_set(
    name: str, given: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apecloud/ApeRAG#1812: a company's proxy answers for 127.0.0.1, or does not."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    if given:
        monkeypatch.setenv("NO_PROXY", given)
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
    environment.spare_loopback()
    environment.spare_loopback()
    assert httpx.get(address).status_code == 204
    assert requests.get(address, timeout=5).status_code == 204
    hosts = os.environ["no_proxy"].split(",")
    assert hosts == [*(host.strip() for host in given.split(",") if host), *environment._LOOPBACK]
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]


@pytest.mark.usefixtures("no_proxies")
def test_nothing_is_set_where_there_is_no_proxy_or_all_is_spared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.spare_loopback()
    assert not [name for name in BYPASS if name in os.environ]
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    environment.spare_loopback()
    assert {os.environ[name] for name in BYPASS} == {"*"}
