"""What MLflow takes as a name and as a value; what it refuses or would change is given another form here."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

_REFUSED = re.compile(r"[^\w.\- :/]")
_NO_PATH = ("", ".", "..")  # parts that make two paths of one file
_MAX_NAME = 250  # characters
_DIGEST = 12


def accepted(name: str) -> str:
    """The name under which MLflow keeps a param, metric or tag: letters, digits and `_-. :/`, like a path, 250 at most.

    >>> [accepted(name) for name in ("pass@4", "timing(s)/gen", "kind=<5%>", "/a//b", "..")]
    ['pass_at_4', 'timing_s_/gen', 'kind__5__', '_/a/_/b', '_']
    """
    text = _REFUSED.sub("_", name.replace("@", "_at_"))
    text = "/".join("_" if part in _NO_PATH else part for part in text.split("/"))
    return shortened(text, _MAX_NAME, mark=f"-{_digest(name)}")


def shortened(text: str, limit: int, *, mark: str | None = None) -> str:
    """A text of at most `limit` characters; one that is cut says so, and differs from others with the same beginning."""
    if len(text) <= limit:
        return text
    ending = f"... ({len(text)} characters, sha256 {_digest(text)})" if mark is None else mark
    return text[: limit - len(ending)] + ending


def measured(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Those that were measured, by accepted names: None and NaN are no measurement."""
    return {
        accepted(key): float(value)
        for key, value in metrics.items()
        if value is not None and not math.isnan(value)
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
