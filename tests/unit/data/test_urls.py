"""URLs as text: quoting, keys without secrets, data: URIs (cases IMG-29, IMG-30, IMG-32)."""

from __future__ import annotations

import base64

import pytest

from polyturn.data.quarantine import RowError
from polyturn.data.urls import cache_key, decode_data_uri, public_url, quote_url
from tests.unit.data.stage import Stage
from tests.unit.data.web import png


@pytest.mark.parametrize(
    ("url", "quoted"),
    [
        ("http://a.test/фиг 1.png", "http://a.test/%D1%84%D0%B8%D0%B3%201.png"),
        ("http://a.test/a%20b.png", "http://a.test/a%20b.png"),
        ("http://a.test/100%.png", "http://a.test/100%25.png"),
        ("http://a.test", "http://a.test/"),
        ("HTTP://A.test:80/x?q=й#part", "http://a.test:80/x?q=%D0%B9"),
        ("http://bücher.test/x", "http://xn--bcher-kva.test/x"),
        ("http://[::1]:8/x", "http://[::1]:8/x"),
    ],
)
def test_quoting_keeps_what_is_quoted(url: str, quoted: str) -> None:
    assert quote_url(url) == quoted
    assert quote_url(quoted) == quoted


@pytest.mark.parametrize("url", ["http:///x", "http://a:b/x", "http://[::1/x", "http://a:99999/x"])
def test_malformed_urls_have_a_reason(url: str) -> None:
    with pytest.raises(RowError, match="bad_url"):
        quote_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://b.s3.test/k.png?X-Amz-Algorithm=A&X-Amz-Signature=SECRET&X-Amz-Expires=60",
        "https://b.s3.test/k.png?AWSAccessKeyId=SECRET&Signature=SECRET&Expires=17",
        "https://a.test/k.png?sv=2022&se=2026&sp=r&sig=SECRET",
        "https://a.test/k.png?Policy=SECRET&Signature=SECRET&Key-Pair-Id=SECRET",
        "https://a.test/k.png?token=SECRET",
        "https://a.test/k.png?x-goog-signature=SECRET&x-goog-date=1",
        "https://user:SECRET@a.test/k.png",
    ],
)
def test_signatures_and_tokens_are_in_neither_key_nor_log(url: str) -> None:
    host = "b.s3.test" if "s3" in url else "a.test"
    assert cache_key(url) == public_url(url) == f"https://{host}/k.png"


def test_ordinary_parameters_stay_part_of_the_address() -> None:
    url = "https://a.test/render?id=7&e=2&expires=no&w=64"
    assert public_url(url) == cache_key(url) == url


@pytest.mark.parametrize(
    "other",
    [
        "HTTP://A.TEST:80/b%2fc.png",
        "http://a.test/b%2Fc.png#x",
        "http://u:p@a.test/b%2Fc.png?token=1",
    ],
)
def test_spellings_of_one_address_share_a_key(other: str) -> None:
    assert cache_key(other) == cache_key("http://a.test/b%2Fc.png")


def _forms(data: bytes) -> dict[str, str]:
    text = base64.b64encode(data).decode()
    return {
        "plain": f"data:image/png;base64,{text}",
        "no padding": f"data:image/png;base64,{text.rstrip('=')}",
        "line breaks": "data:image/png;base64,"
        + "\n".join(text[i : i + 20] for i in range(0, len(text), 20)),
        "url alphabet": f"data:image/png;base64,{text.replace('+', '-').replace('/', '_')}",
        "escaped": f"data:image/png;base64,{text.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        "upper": f"DATA:image/png;BASE64,{text}",
        "mime None": f"data:image/None;base64,{text}",
        "mime jpg": f"data:image/jpg;base64,{text}",
        "no mime": f"data:;base64,{text}",
        "parameters": f"data:image/png;name=a.png;base64,{text}",
        "space": f"data:image/png; base64,{text}",
        "parameters after": f"data:image/png;base64;name=a.png,{text}",
        "not base64": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    }


@pytest.mark.parametrize("name", list(_forms(b"")))
def test_all_forms_of_a_data_uri_give_the_same_bytes(name: str) -> None:
    """IMG-30, IMG-32."""
    data = png((8, 8), compress_level=0) + b"\xfb\xff\xfe"
    assert decode_data_uri(_forms(data)[name]) == data


@pytest.mark.parametrize(
    "uri",
    ["data:image/png;base64,!!!garbage!!!", "data:image/png;base64", "data:;base64,A", "data:"],
)
def test_garbage_in_a_data_uri_has_a_reason(uri: str) -> None:
    with pytest.raises(RowError, match="bad_data_uri"):
        decode_data_uri(uri)


def test_data_uris_are_stored_by_content_and_shown_by_hash(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    sources = _forms(png((32, 32)))
    done = stage.run({**sources, "bad": "data:image/png;base64,%%%"})
    assert done.kept == list(sources)
    assert len(list((done.out / "png").iterdir())) == 1
    assert done.set_aside["bad"].reason == "bad_data_uri"
    # image/None, image/jpg and the missing type: noted once for the dataset, not per row.
    [note] = [message for message in caplog.messages if "another type" in message]
    assert note.startswith("3 data: URIs")
    assert b"base64," not in (done.out / "manifest.parquet").read_bytes()
