"""The control endpoints of one SGLang server: health, version, memory, weights, cache (blocking HTTP)."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import httpx
from packaging.version import InvalidVersion, Version

# First version that works, first that does not count as tested.
TESTED = (Version("0.5.12"), Version("0.5.18"))


class ServerError(RuntimeError):
    """A server does not do what it was asked; the message names it, the call and its answer."""


@dataclass(frozen=True)
class Control:
    """Talks to the server at `url` (http://host:port), past any proxy that the environment names, as replies do."""

    url: str
    timeout_s: float = 120.0

    def is_healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health answers 200; it runs a token through an idle engine."""
        try:
            answer = _client().get(f"{self.url}/health", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def version(self) -> str:
        """SGLang's version."""
        return str(self._get("/server_info").get("version"))

    def weight_version(self) -> str:
        """What the last weight update was called."""
        return str(self._get("/model_info").get("weight_version"))

    def flush_cache(self, patience_s: float = 30.0) -> None:
        """Empty the prefix cache; the server refuses while requests run, so it is asked again."""
        deadline = time.monotonic() + patience_s
        while True:
            answer = self._send("/flush_cache", {})
            if answer.status_code == 200:
                return
            if time.monotonic() > deadline:
                raise self._refused("/flush_cache", answer)
            time.sleep(0.1)

    def call(self, path: str, content: Mapping[str, object]) -> Mapping[str, object]:
        """POST and return the JSON answer (empty where the server sends none).

        Raises:
            ServerError: no answer, another status than 200, or `"success": false`.
        """
        answer = self._send(path, content)
        if answer.status_code != 200:
            raise self._refused(path, answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        told = self._parsed(path, answer) if is_json and answer.content else None
        if isinstance(told, dict):
            if told.get("success") is False:
                raise self._refused(path, answer)
            return cast("Mapping[str, object]", told)
        return {}

    def _get(self, path: str) -> Mapping[str, object]:
        try:
            answer = _client().get(f"{self.url}{path}", timeout=self.timeout_s)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        if answer.status_code != 200:
            raise self._refused(path, answer)
        told = self._parsed(path, answer)
        if not isinstance(told, dict):
            raise self._refused(path, answer)
        return cast("Mapping[str, object]", told)

    def _send(self, path: str, content: Mapping[str, object]) -> httpx.Response:
        try:
            return _client().post(f"{self.url}{path}", json=content, timeout=self.timeout_s)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from None

    def _parsed(self, path: str, answer: httpx.Response) -> object:
        try:
            return answer.json()
        except ValueError:
            raise self._refused(path, answer) from None

    def _refused(self, path: str, answer: httpx.Response) -> ServerError:
        return ServerError(f"{self.url}{path}: HTTP {answer.status_code}: {answer.text[:500]}")


@functools.cache
def _client() -> httpx.Client:
    """One for all calls, as each new one reads the host's certificates; a connection serves one call."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def check_version(version: str) -> str | None:
    """What to tell about a server's version: None where it is in the tested range.

    >>> check_version("0.5.15") is None
    True
    """
    release: tuple[int, ...] = ()
    with suppress(InvalidVersion):
        release = Version(version).release[:3]
    if TESTED[0].release <= release < TESTED[1].release:
        return None
    return f"SGLang {version} is outside of the tested range {TESTED[0]} <= version < {TESTED[1]}"
