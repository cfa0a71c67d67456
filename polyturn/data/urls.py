"""Image URLs as text: quoting, cache keys without secrets, data: URIs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from urllib.parse import quote, unquote_to_bytes, urlsplit, urlunsplit

from polyturn.data.quarantine import RowError

# Query parameters that grant access: never in a cache key, manifest or log.
_SECRETS = frozenset(
    [
        "signature",
        "sig",
        "token",
        "access_token",
        "auth_token",
        "auth",
        "id_token",
        "security-token",
        "apikey",
        "api_key",
        "api-key",
        "awsaccesskeyid",
        "googleaccessid",
        "ossaccesskeyid",
        "key-pair-id",
        "policy",
        "hdnts",
        "hdnea",
        "hmac",
        "password",
        "secret",
    ]
)
_SECRET_PREFIXES = ("x-amz-", "x-goog-", "x-oss-", "x-obs-", "x-cos-", "q-sign-")
# Parameters that belong to a signature and vary with it; ordinary names where nothing is signed.
_COMPANIONS = frozenset(
    [
        "expires",
        "se",
        "sp",
        "sv",
        "sr",
        "st",
        "spr",
        "sip",
        "skoid",
        "sktid",
        "skt",
        "ske",
        "sks",
        "skv",
        "ak",
        "e",
        "exp",
        "ts",
        "q-ak",
    ]
)
_QUOTE_SAFE = "%/:?#[]@!$&'()*+,;=~-._"
_DATA_URI = re.compile(r"data:([^,]*),(.*)", re.IGNORECASE | re.DOTALL)
_BASE64 = re.compile(r";\s*base64\s*(?:;|$)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def quote_url(url: str) -> str:
    """Percent-encode what a URL must not hold (letters beyond ASCII, spaces); escapes already there stay.

    Raises:
        RowError: bad_url, the URL has no host or a malformed port or host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if host is not None and not host.isascii():
            host = host.encode("idna").decode("ascii")
    except (ValueError, UnicodeError) as error:
        raise RowError("bad_url", f"{public_url(url)!r}: {error}") from None
    if not host:
        raise RowError("bad_url", f"{public_url(url)!r} has no host")
    name = f"[{host}]" if ":" in host else host
    userinfo = parts.netloc.rpartition("@")[0]
    netloc = (f"{userinfo}@" if userinfo else "") + name + (f":{port}" if port is not None else "")
    try:
        path, query = _quote(parts.path) or "/", _quote(parts.query)
    except UnicodeError:
        raise RowError("bad_url", f"{public_url(url)!a} holds characters of no text") from None
    return urlunsplit((parts.scheme.lower(), netloc, path, query, ""))


def _quote(text: str) -> str:
    # Bytes of a redirect that are not UTF-8 go back as they came. A percent sign that starts no escape is escaped.
    quoted = quote(text, safe=_QUOTE_SAFE, errors="surrogateescape")
    return re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", quoted)


def public_url(url: str) -> str:
    """The URL as it may be shown and stored: no user name, password, signature or token; data: by its hash."""
    if url[:5].lower() == "data:":
        mime = url[5:].split(",", 1)[0].split(";", 1)[0][:40]
        return f"data:{mime};sha256={hashlib.sha256(url.encode()).hexdigest()}"
    if _is_s3(url):
        return url  # all of it is a key, and its ? and # are letters of the key
    head, mark, fragment = url.partition("#")
    address, question, query = head.partition("?")
    scheme, separator, rest = address.partition("://")
    if separator:
        authority, slash, path = rest.partition("/")
        address = f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
    if not question:
        return address + mark + fragment
    pairs = query.split("&")
    kept = [pair for pair in pairs if not _is_secret(pair)]
    if len(kept) < len(pairs):
        kept = [pair for pair in kept if _name(pair) not in _COMPANIONS]
    return address + ("?" + "&".join(kept) if kept else "") + mark + fragment


def _is_s3(url: str) -> bool:
    return url[:5].lower() == "s3://"


def _name(pair: str) -> str:
    return pair.partition("=")[0].lower()


def _is_secret(pair: str) -> bool:
    return _name(pair) in _SECRETS or _name(pair).startswith(_SECRET_PREFIXES)


def cache_key(url: str) -> str:
    """One key for all spellings of one address: public, quoted, lower-case host, no default port or fragment.

    Raises:
        RowError: bad_url.
    """
    if _is_s3(url):
        return url
    parts = urlsplit(quote_url(public_url(url).partition("#")[0]))
    netloc = parts.netloc.lower()
    port = _DEFAULT_PORTS.get(parts.scheme)
    if port is not None:
        netloc = netloc.removesuffix(f":{port}")
    path = re.sub(r"%[0-9a-fA-F]{2}", lambda match: match[0].upper(), parts.path)
    return urlunsplit((parts.scheme, netloc, path, parts.query, ""))


def decode_data_uri(uri: str) -> bytes:
    """The bytes of a data: URI; white space, missing padding, the -_ alphabet and base64 anywhere in its head are accepted.

    Raises:
        RowError: bad_data_uri.
    """
    match = _DATA_URI.fullmatch(uri.strip())
    if match is None:
        raise RowError("bad_data_uri", f"no comma in {uri[:40]!r}")
    body = unquote_to_bytes(match[2])
    if not _BASE64.search(match[1]):
        return body
    text = re.sub(rb"\s", b"", body).rstrip(b"=").replace(b"-", b"+").replace(b"_", b"/")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise RowError("bad_data_uri", f"not base64: {error}") from None


def declared_type(uri: str) -> str:
    """What a data: URI says it is, such as image/png; empty if it says nothing.

    >>> declared_type("data:image/None;base64,AAAA")
    'image/none'
    """
    return uri[5:].split(",", 1)[0].split(";", 1)[0].strip().lower()
