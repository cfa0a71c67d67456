"""Which network addresses an image may come from; checked at the moment of connecting, so DNS cannot cheat."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult

from polyturn.data.quarantine import RowError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Public by its number, yet the host's own metadata service on Azure.
_METADATA = (ipaddress.ip_address("168.63.129.16"),)
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_V4_COMPATIBLE = ipaddress.ip_network("::/96")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the open internet, also the IPv4 address inside an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded_v4(address)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and address not in _METADATA


def _embedded_v4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _NAT64) or (
        address in _V4_COMPATIBLE and int(address) > 1
    ):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def check_url(url: str, allow_hosts: Sequence[str]) -> None:
    """Refuse a URL by its scheme, or by its host where that is an address in numbers.

    Raises:
        RowError: blocked_scheme, blocked_address.
    """
    check_scheme(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if is_allowed(host, port, allow_hosts):
        return
    try:
        # inet_aton reads decimal, octal, hexadecimal and shortened forms as C libraries do.
        address: Address = ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except (OSError, UnicodeError):
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return
    if not is_public(address):
        raise blocked(host)


def check_scheme(url: str) -> None:
    """Refuse a URL by its scheme alone, so that one without a host (file:///...) is told apart from a malformed one.

    Raises:
        RowError: blocked_scheme.
        ValueError: it is no URL.
    """
    scheme = urlsplit(url).scheme
    if scheme not in ("http", "https"):
        raise RowError(
            "blocked_scheme", f"{scheme or 'no scheme'}: only http and https are followed"
        )


def is_allowed(host: str, port: int, allow_hosts: Sequence[str]) -> bool:
    """Whether images.allow_hosts names the host, or host:port."""
    return host in allow_hosts or f"{host}:{port}" in allow_hosts


def blocked(host: str) -> RowError:
    """The refusal of a host, with the way out."""
    return RowError(
        "blocked_address",
        f"{host} is a loopback, private or metadata address; images.allow_hosts can name it",
    )


class GuardedResolver(AbstractResolver):
    """Resolves names for the HTTP client, which connects to exactly the addresses that were checked here.

    `served` maps host names to the (address, port) of this process's own loopback servers.
    """

    def __init__(self, allow_hosts: Sequence[str], served: Mapping[str, tuple[str, int]]) -> None:
        self._allow_hosts = tuple(allow_hosts)
        self._served = dict(served)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The public addresses of a host.

        Raises:
            RowError: blocked_address, if any of its addresses is not public.
            OSError: the name does not resolve.
        """
        if host in self._served:
            address, served_port = self._served[host]
            return [_result(host, address, served_port, socket.AF_INET)]
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
        )
        results = [_result(host, str(item[4][0]), port, item[0]) for item in found]
        if not is_allowed(host, port, self._allow_hosts):
            for result in results:
                if not is_public(ipaddress.ip_address(result["host"].partition("%")[0])):
                    raise blocked(host)
        return results

    async def close(self) -> None:
        """Nothing is held."""


def _result(hostname: str, address: str, port: int, family: int) -> ResolveResult:
    return ResolveResult(
        hostname=hostname,
        host=address,
        port=port,
        family=family,
        proto=0,
        flags=socket.AI_NUMERICHOST,
    )
