"""Rows in Geometry3K's shape (problem, answer, images) from a directory, .jsonl, .parquet, .arrow, s3:// or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import pyarrow.parquet as pq
from huggingface_hub import HfApi

from polyturn.data.s3 import ObjectStore, parent_uri
from polyturn.data.saved import read_arrow, saved_files
from polyturn.params import DataParams, ImagesParams, ParamsError
from polyturn.pipeline.checkout import from_checkout

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testmini"),
}
_OTHER_FORMATS = frozenset(
    [
        ".csv",
        ".tsv",
        ".feather",
        ".xlsx",
        ".zip",
        ".gz",
        ".bz2",
        ".xz",
        ".zst",
        ".tar",
        ".tgz",
        ".pkl",
        ".pickle",
    ]
)
_BATCH_ROWS = 256
_HUB_TIMEOUT_S = 20


@dataclass(frozen=True)
class LineError:
    """A line that is no JSON object; it stands in the stream of rows where the row would be."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line} is not valid JSON: {self.message}"


@dataclass(frozen=True)
class UnknownSplit:
    """A row whose split column names no split; it stands in the stream of training rows in the row's place."""

    row: Mapping[str, object]

    def __str__(self) -> str:
        known = ", ".join(name for names in SPLIT_NAMES.values() for name in names)
        return f"split {self.row.get('split')!r} is none of {known}"


@dataclass(frozen=True)
class FileSource:
    """Rows of local .jsonl, .parquet and .arrow files; `root` holds relative pictures, `base_url` prefixes them."""

    files: tuple[Path, ...]
    root: Path | None
    base_url: str | None = None

    def load(self, split: str) -> Iterator[object]:
        """The rows of one split: by their split column, else by their file's name or folder, else train.

        A row of another split than these is an `UnknownSplit`: it could be anybody's test row.

        Raises:
            ParamsError: a file is no Parquet.
        """
        for path in self.files:
            of_file = split_of_name(str(path.relative_to(self.root)) if self.root else path.name)
            for raw in read_rows(path):
                label = None if isinstance(raw, LineError) else raw.get("split")
                own = canonical_split(label)
                if own is None and isinstance(raw, Mapping) and isinstance(label, str) and label:
                    if split == "train":
                        yield UnknownSplit(raw)
                elif (own or of_file or "train") == split:
                    yield raw


def hub_commit(name: str, revision: str | None) -> str:
    """The commit that a revision of a Hugging Face dataset stands for, so that a run can name its data.

    Raises:
        ParamsError: the dataset or revision does not exist or cannot be reached.
    """
    try:
        sha = HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # of requests, httpx or httpx2, whichever the hub's library has
        raise _hub_error(name, revision, error) from None
    return sha or revision or "main"


def _hub_error(name: str, revision: str | None, error: Exception) -> ParamsError:
    return ParamsError(
        f"data.path: Hugging Face dataset {name!r} at revision {revision!r} cannot be opened "
        f"({type(error).__name__}: {str(error)[:200]}); check the id, data.revision and the network, or is it a local "
        "path that does not exist?"
    )


class _HubDataset(Protocol):
    def decode(self, enable: bool) -> Iterable[object]: ...


@dataclass(frozen=True)
class HubSource:
    """Rows of a Hugging Face dataset, streamed; pictures stay encoded."""

    name: str
    revision: str | None
    root: Path | None = None
    base_url: str | None = None

    def load(self, split: str) -> Iterator[object]:
        """The rows of one split, empty if the dataset has no split of that name.

        Raises:
            ParamsError: the dataset or revision does not exist or cannot be reached.
        """
        # Seconds of import time, for this source only.
        import datasets  # noqa: PLC0415

        try:
            names = datasets.get_dataset_split_names(self.name, revision=self.revision)
            own = next((name for name in names if canonical_split(name) == split), None)
            if own is None:
                return
            stream = datasets.load_dataset(
                self.name, split=own, revision=self.revision, streaming=True
            )
        except Exception as error:  # as above
            raise _hub_error(self.name, self.revision, error) from None
        yield from cast("_HubDataset", stream).decode(False)


def open_geo3k(params: DataParams, images: ImagesParams, work_dir: Path) -> FileSource | HubSource:
    """Open data.path.

    Raises:
        ParamsError: data.path is missing or names nothing readable.
    """
    if not params.path:
        raise ParamsError(
            "data.path: source geo3k needs a directory, .jsonl, .parquet, s3:// URI or dataset id, got null"
        )
    if params.path.startswith("s3://"):
        files = ObjectStore(images).download_dataset(params.path, work_dir / "dataset")
        return FileSource(files, None, params.base_url or parent_uri(params.path))
    path = from_checkout(params.path)
    if path.is_dir():
        return FileSource(dataset_files(path), path, params.base_url)
    if path.is_file():
        return FileSource((path,), path.parent, params.base_url)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", params.path) and path.suffix not in (
        ".jsonl",
        ".parquet",
    ):
        return HubSource(
            params.path, hub_commit(params.path, params.revision), base_url=params.base_url
        )
    raise ParamsError(
        f"data.path: {params.path!r} is neither a file nor a directory; name a directory with problems.jsonl or "
        "*.parquet, one such file, an s3:// URI or a hub id"
    )


def dataset_files(directory: Path) -> tuple[Path, ...]:
    """problems.jsonl, else all .jsonl, else all .parquet files (in data/, or in any folder below), by name, else what
    `datasets.save_to_disk` wrote.

    Raises:
        ParamsError: there is none.
    """
    if (directory / "problems.jsonl").is_file():
        return (directory / "problems.jsonl",)
    for pattern in ("*.jsonl", "*.parquet", "data/*.parquet", "**/*.parquet"):
        files = tuple(sorted(directory.glob(pattern)))
        if files:
            return files
    if files := saved_files(directory):
        return files
    names = sorted(path.name for path in directory.iterdir())
    raise ParamsError(
        f"data.path: {directory} holds neither problems.jsonl nor .jsonl or .parquet files nor what "
        f"datasets.save_to_disk writes, but {', '.join(names[:5]) or 'nothing'}{', ...' if len(names) > 5 else ''}; "
        "convert it, or name a file that is one JSON list"
    )


def canonical_split(name: object) -> str | None:
    """train, validation or test for the names that datasets use; None for anything else."""
    lowered = str(name).lower()
    return next((split for split, names in SPLIT_NAMES.items() if lowered in names), None)


def split_of_name(name: str) -> str | None:
    """The split in a name such as val.jsonl, test-00000-of-00001.parquet, default/train/0000.parquet.

    The file's own name comes first, then its folder's; `__` stands for `/` in names of downloaded files.
    """
    words = (
        word
        for part in reversed(re.split("/|__", name.lower()))
        for word in re.split(r"[^a-z]+", part)
    )
    return next((split for word in words if (split := canonical_split(word))), None)


def read_rows(path: Path) -> Iterator[Mapping[str, object] | LineError]:
    """Stream the rows of one .jsonl, .parquet or .arrow file, or read those of a .json list.

    Raises:
        ParamsError: the file cannot be read at all.
    """
    if path.suffix in _OTHER_FORMATS:
        raise ParamsError(
            f"data.path: {path} is a {path.suffix} file; .jsonl, .json (one list) and .parquet are read, so convert it"
        )
    if path.suffix == ".arrow":
        yield from read_arrow(path)
        return
    if path.suffix != ".parquet":
        yield from _read_array(path) if _is_array(path) else _read_lines(path)
        return
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from cast("list[dict[str, object]]", batch.to_pylist())
    except (
        OSError,
        ValueError,
        NotImplementedError,
    ) as error:  # Arrow has classes of its own of each
        raise ParamsError(f"data.path: {path} is not a readable Parquet file: {error}") from None


def _is_array(path: Path) -> bool:
    """Whether the file is one JSON list, as many data sets are published, and not an object per line."""
    with path.open("rb") as file:
        return file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_array(path: Path) -> Iterator[Mapping[str, object] | LineError]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ParamsError(
            f"data.path: {path} begins as a list and is not valid JSON: {error}; make it an object per line to have "
            "bad rows set aside"
        ) from None
    for number, row in enumerate(cast("list[object]", rows), start=1):
        if isinstance(row, dict):
            yield cast("dict[str, object]", row)
        else:
            yield LineError(path.name, number, f"it holds {type(row).__name__}, not an object")


def _read_lines(path: Path) -> Iterator[Mapping[str, object] | LineError]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield LineError(path.name, number, str(error))
                continue
            if isinstance(row, dict):
                yield cast("dict[str, object]", row)
            else:
                yield LineError(path.name, number, f"it holds {type(row).__name__}, not an object")
