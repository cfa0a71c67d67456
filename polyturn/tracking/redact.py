"""Secrets out of what is recorded: tokens, keys and presigned URLs in diffs, params, tags and lock files."""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK = "[REDACTED]"


@dataclass(frozen=True)
class Redacted:
    """Text without its secrets, and how many were taken out."""

    text: str
    count: int


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.VERBOSE)


# Each matches what stays before the secret as group `keep` (may be empty) and the secret itself.
_TOKENS = _pattern(
    r"""(?P<keep>(?<![A-Za-z0-9]))(?:
      (?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}                 # AWS access key ids
    | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{22,}     # GitHub
    | glpat-[\w-]{18,} | gl(?:dt|rt|ptt|soat)-[\w-]{18,}  # GitLab
    | hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}      # Hugging Face
    | sk-[A-Za-z0-9_-]{20,}                               # OpenAI, Anthropic and those that follow them
    | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}                # Stripe
    | xox[abeprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,}  # Slack
    | AIza[\w-]{35} | ya29\.[\w-]{20,}                    # Google
    | pnu_[A-Za-z0-9]{20,} | pnb_[A-Za-z0-9]{20,}         # Prefect
    | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}              # package registries
    | dop_v1_[a-f0-9]{40,} | nvapi-[\w-]{20,} | dapi[a-f0-9]{32} | r8_[A-Za-z0-9]{30,} | gsk_[A-Za-z0-9]{30,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                     # JSON web tokens
    )"""
)
_SIGNED = _pattern(
    r"""(?P<keep>[?&;](?:amp;)?(?:
      (?i:X-(?:Amz|Goog|Oss|Cos)-(?:Signature|Credential|Security-Token))
    | (?i:Signature|AWSAccessKeyId|GoogleAccessId|Policy|Key-Pair-Id|sig|token|access_token|api_?key|key|auth|password
    |q-signature)
    )=)(?!\[REDACTED)[^&\s"'<>)\]}]+"""
)
_URL_LOGIN = _pattern(r"""(?P<keep>[A-Za-z][\w+.-]*://)[^\s/@:'"]*:[^\s/@'"]+(?=@)""")
_URL_TOKEN = _pattern(r"""(?P<keep>https?://)[A-Za-z0-9_-]{16,}(?=@)""")
_HEADER = _pattern(
    r"""(?P<keep>(?i:authorization)["']?\s*[:=]\s*["']?(?i:bearer|basic|token)\s+)[A-Za-z0-9._~+/=-]{6,}"""
)
_BEARER = _pattern(r"""(?P<keep>\b[Bb]earer\s+)[A-Za-z0-9._~+/=-]{16,}""")
_WEBHOOK = _pattern(
    r"""(?P<keep>https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks)/)[\w/-]+"""
)
_PRIVATE_KEY = re.compile(
    r"(?P<keep>-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----)"
    r"(?:.(?!-----END))*.(?=-----END|\Z)",
    re.DOTALL,
)
# NAME = VALUE where the name ends in a word for a secret (max_tokens and token_ids do not), and the value is a literal:
# quoted, or in capitals' company of digits and long enough not to be an expression.
_NAME = r"""(?i:(?:\b|[\w.-]*[_.-])(?:password|passwd|passphrase|pwd|secret|secret_?key|token|api_?key|apikey|access_?key
      |access_key_id|secret_access_key|session_token|private_?key|client_?secret|credentials?|auth_?key|account_?key
      |connection_?string|license_?key))"""
_QUOTED = _pattern(
    rf"""(?P<keep>{_NAME}["']?\]?\s*(?:[:=]|=>)\s*[rbuf]?["'])(?!\s|[$]\{{|\$\(|<|\[REDACTED)[^"'\n]{{6,}}(?=["'])"""
)
_BARE = _pattern(
    rf"""(?P<keep>{_NAME}["']?\s*[:=]\s*)(?=[^\s"',;]*\d)(?=[^\s"',;]*[A-Za-z])[A-Za-z0-9+/_.~!@#%^*-]{{8,}}={{0,2}}
    (?=[\s"',;&]|\Z)"""
)
_CALL = _pattern(  # os.environ.setdefault("NAME", "value")
    rf"""(?P<keep>\(\s*["'](?=[A-Z0-9_]+["']){_NAME}["']\s*,\s*["'])(?![A-Z_]+["'])[^"'\s]{{4,}}(?=["']\s*\))"""
)
# What files of credentials and `export` lines hold may be letters alone.
_EXPORTED = _pattern(
    r"""(?P<keep>(?<![\w.$])(?:[A-Z][A-Z0-9_]*_)?
    (?:PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|ACCESS_KEY_ID|CREDENTIALS)(?:=|:[ ]+)["']?)
    (?![$<{\["']|None\b|null\b|\w+\()[^\s"']{4,}"""
)
_PATTERNS = (
    _PRIVATE_KEY, _SIGNED, _URL_LOGIN, _URL_TOKEN, _WEBHOOK, _HEADER, _BEARER, _TOKENS, _EXPORTED, _QUOTED, _CALL,
    _BARE,
)  # fmt: skip


def redact(text: str) -> Redacted:
    """Put MARK in the place of every secret; the rest stays as it is.

    >>> redact("see https://bucket.s3.amazonaws.com/a?X-Amz-Date=1&X-Amz-Signature=0a1b2c")
    Redacted(text='see https://bucket.s3.amazonaws.com/a?X-Amz-Date=1&X-Amz-Signature=[REDACTED]', count=1)
    """
    count = 0
    for pattern in _PATTERNS:
        text, found = pattern.subn(_without, text)
        count += found
    return Redacted(text, count)


def _without(match: re.Match[str]) -> str:
    # The lines of a key in a diff stay lines, so that the hunk keeps its length.
    lines = match.group(0)[len(match.group("keep")) :].count("\n")
    return f"{match.group('keep')}{MARK}" + "\n" * lines
