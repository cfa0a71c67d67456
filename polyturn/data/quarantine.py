"""Rows that are set aside: one format, named reasons, nothing silent.

Reasons of rows: bad_json, bad_row, bad_split, bad_text, duplicate_id, missing_problem, bad_content, bad_role,
unsupported_media, bad_image, unnamed_image, image_count, missing_answer, bad_answer, ambiguous_answer, unrenderable, prompt_too_long,
shared_with_train.
Reasons of sources: blocked_scheme, blocked_address, blocked_path, bad_url, missing_file, bad_data_uri.
Reasons of a fetch: http_<status>, timeout, connection, dns, tls, too_large, too_many_redirects, empty_body,
short_body, content_encoding, s3_<code>.
Reasons of a picture: not_an_image, truncated, corrupt, too_many_pixels, aspect_ratio, too_small,
unsupported_mode, not_finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from polyturn.data.files import read_jsonl, write_jsonl


@dataclass(frozen=True)
class SetAside:
    """One row that a stage kept out, with a reason of the list above and a sentence for a person."""

    id: str
    split: str
    stage: str
    reason: str
    detail: str


class RowError(ValueError):
    """A row (or its picture) cannot be used; caught where rows are set aside."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def write_quarantine(path: Path, rows: Iterable[SetAside]) -> int:
    """Write quarantine.jsonl; returns the number of rows."""
    return write_jsonl(path, (asdict(row) for row in rows))


def read_quarantine(path: Path) -> list[SetAside]:
    """Read quarantine.jsonl."""
    return [SetAside(**{key: str(value) for key, value in row.items()}) for row in read_jsonl(path)]


def reason_table(counts: Counter[str] | dict[str, int], total: int) -> str:
    """A table of reasons and counts for a person, the most frequent first.

    >>> print(reason_table({"timeout": 1, "http_404": 3}, 8))
    reason      rows   share
    http_404       3   37.5%
    timeout        1   12.5%
    """
    width = max([len("reason"), *map(len, counts)])
    lines = [f"{'reason':<{width}}  {'rows':>6}  {'share':>6}"]
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"{reason:<{width}}  {count:>6}  {count / max(total, 1):>6.1%}")
    return "\n".join(lines)
