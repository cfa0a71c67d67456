"""The fetch stage's out: parsed rows with stable picture sources, and copies of local pictures."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

from polyturn.data.files import inside, write_jsonl
from polyturn.data.geo3k import LineError, UnknownSplit
from polyturn.data.normalise import FORMATS, sniff
from polyturn.data.quarantine import RowError, SetAside, write_quarantine
from polyturn.data.rows import Embedded, ImageSource, Row, parse_row, row_id
from polyturn.data.sources import SPLITS, Source, counts
from polyturn.params import DataParams

_log = logging.getLogger(__name__)
_SCHEMES = ("http", "https", "s3", "data")
PICTURES = "pictures"


@dataclass(frozen=True)
class RawReport:
    """What the fetch stage kept, per split, and what it set aside."""

    kept: Mapping[str, int]
    set_aside: tuple[SetAside, ...]
    num_tags_added: int


@dataclass
class RawWriter:
    """Writes problems.jsonl, quarantine.jsonl and pictures/ of one dataset into `out`.

    Relative pictures are looked up under `source.root`; under a base URL they become URLs, and they are
    copied only if the images stage serves that host itself (`serve_host`).
    """

    out: Path
    source: Source
    params: DataParams
    serve_host: str | None
    parse_answer: Callable[[str], str]
    on_row: Callable[[], None]
    _kept: dict[str, int] = field(default_factory=dict[str, int])
    _set_aside: list[SetAside] = field(default_factory=list[SetAside])
    _split_of: dict[str, str] = field(default_factory=dict[str, str])  # by id
    _num_renamed: int = 0
    _tags_added: int = 0

    def write(self) -> RawReport:
        """Write everything.

        Raises:
            ValueError: no row of a dataset is usable, or data.on_bad_line is stop and a line is no JSON.
        """
        (self.out / PICTURES).mkdir(parents=True, exist_ok=True)
        write_jsonl(self.out / "problems.jsonl", self._lines())
        write_quarantine(self.out / "quarantine.jsonl", self._set_aside)
        for split, count in self._kept.items():
            wanted = counts(self.params)[split]
            if wanted is not None and count < wanted:
                _log.warning(
                    "data.num_%s asks for %d problems, %d are usable", split, wanted, count
                )
        if not sum(self._kept.values()):
            first = f"; the first: {self._set_aside[0]}" if self._set_aside else ""
            raise ValueError(
                f"data.source {self.params.source} gives no usable row ({len(self._set_aside)} set aside{first})"
            )
        if self._tags_added:
            _log.warning(
                "data.add_image_tag put <image> in front of %d rows that have pictures and no tag",
                self._tags_added,
            )
        if self._num_renamed:
            _log.warning(
                "%d rows have ids that rows of another split have; they are named SPLIT/ID",
                self._num_renamed,
            )
        return RawReport(self._kept, tuple(self._set_aside), self._tags_added)

    def _lines(self) -> Iterator[dict[str, object]]:
        for split in SPLITS:
            self._kept[split] = 0
            rows = self.source.load(split)
            for index, raw in enumerate(itertools.islice(rows, counts(self.params)[split])):
                line = self._line(raw, split, index)
                self.on_row()
                if line is not None:
                    self._kept[split] += 1
                    yield line

    def _line(self, raw: object, split: str, index: int) -> dict[str, object] | None:
        try:
            row = self._parse(raw, split, index)
            _check_text(row)
            sources = [self._place(image) for image in row.images]
        except RowError as error:
            name = row_id(raw.row if isinstance(raw, UnknownSplit) else raw, split, index)
            if isinstance(raw, LineError):
                name = f"{raw.path}:{raw.line}"
            self._set_aside.append(SetAside(name, split, "fetch", error.reason, error.detail))
            return None
        self._tags_added += row.is_tag_added
        prompt = row.problem
        if not isinstance(prompt, str):
            prompt = [{"role": role, "content": text} for role, text in prompt]
        return {
            "id": row.id,
            "split": split,
            "problem": prompt,
            "answer": row.answer,
            "images": sources,
            "metadata": dict(row.metadata),
        }

    def _parse(self, raw: object, split: str, index: int) -> Row:
        if isinstance(raw, LineError):
            if self.params.on_bad_line == "stop":
                raise ValueError(f"{raw}; correct the line or set data.on_bad_line: set_aside")
            raise RowError("bad_json", str(raw))
        if isinstance(raw, UnknownSplit):
            raise RowError("bad_split", str(raw))
        row = parse_row(
            raw, split=split, index=index, params=self.params, parse_answer=self.parse_answer
        )
        row = self._named(row)
        self._split_of[row.id] = split
        return row

    def _named(self, row: Row) -> Row:
        """The row under an id of its own: many datasets count anew in each split."""
        if self._split_of.get(row.id, row.split) != row.split:
            self._num_renamed += 1
            row = replace(row, id=f"{row.split}/{row.id}")
        if row.id in self._split_of:
            raise RowError("duplicate_id", f"an earlier row has id {row.id!r}")
        return row

    def _place(self, image: ImageSource) -> str:
        """The source that goes into problems.jsonl; local pictures are copied beside it."""
        if isinstance(image, Embedded):
            name = (
                image.name if PurePosixPath(image.name).suffix else image.name + _suffix(image.data)
            )
            self._target(name).write_bytes(image.data)
            return self._source_of(name) if self._is_served() else name
        scheme = image.partition(":")[0].lower() if ":" in image else ""
        if scheme in _SCHEMES:
            return image
        if "://" in image or scheme == "file":
            raise RowError(
                "blocked_scheme", f"{image[:200]!r}: only {', '.join(_SCHEMES)} are fetched"
            )
        return self._place_relative(image)

    def _place_relative(self, path: str) -> str:
        base_url = self.source.base_url
        name = path.replace("\\", "/")
        if ".." in PurePosixPath(name).parts or (self.source.root is None and name.startswith("/")):
            raise RowError("blocked_path", f"{path[:200]!r} leads out of the dataset")
        if base_url is not None and not self._is_served():
            return _join(base_url, name)
        if self.source.root is None:
            raise RowError(
                "missing_file", f"{path[:200]!r} is relative, and the dataset has no directory"
            )
        root = self.source.root.resolve()
        try:
            found = inside(self.source.root, name)
            is_there = found is not None and found.is_file()
        except (OSError, ValueError):  # too long, or with a zero byte
            raise RowError("missing_file", f"{path[:200]!r} can be the name of no file") from None
        if found is None:
            raise RowError("blocked_path", f"{path[:200]!r} leads out of the dataset")
        if not is_there:
            raise RowError("missing_file", f"{path[:200]!r} does not exist in the dataset")
        name = os.path.relpath(root / name, root).replace(os.sep, "/")
        target = self._target(name)
        if not target.exists():
            shutil.copyfile(found, target)
        return self._source_of(name)

    def _is_served(self) -> bool:
        base_url = self.source.base_url
        return base_url is not None and urlsplit(base_url).hostname == self.serve_host

    def _source_of(self, name: str) -> str:
        base_url = self.source.base_url
        return name if base_url is None else _join(base_url, name)

    def _target(self, name: str) -> Path:
        """Where a picture goes: under served URLs, the path of the URL."""
        folder = urlsplit(self.source.base_url or "").path.strip("/") if self._is_served() else ""
        target = self.out / PICTURES / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _check_text(row: Row) -> None:
    """Refuse what JSON can say and UTF-8 cannot: half of a pair of surrogates, which no tokenizer takes either.

    Raises:
        RowError: bad_text.
    """
    sources = [image for image in row.images if isinstance(image, str)]
    text = json.dumps([row.id, row.problem, row.answer, sources, row.metadata], ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        raise RowError("bad_text", f"half a character (a lone surrogate) in {around!a}") from None


def _join(base_url: str, name: str) -> str:
    """The address of a relative picture; the key of an S3 object is written as it is."""
    is_s3 = urlsplit(base_url).scheme == "s3"
    return f"{base_url.rstrip('/')}/{name if is_s3 else quote(name)}"


def _suffix(data: bytes) -> str:
    kind = sniff(data)
    return f".{kind.lower()}" if kind in FORMATS else ".bin"
