"""Where rows come from: drawn figures, Geometry3K-shaped files, or the user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from polyturn.data.geo3k import open_geo3k
from polyturn.data.synthetic import SyntheticSource
from polyturn.envs.base import load_object
from polyturn.params import DataParams, ImagesParams, ParamsError
from polyturn.pipeline.checkout import from_checkout

SPLITS = ("train", "validation", "test")


class Source(Protocol):
    """A dataset: `load(split)` gives its rows, in a stable order.

    A row is a mapping of columns; a `LineError` or `UnknownSplit` stands where one cannot be used.
    """

    @property
    def root(self) -> Path | None:
        """The directory of relative pictures."""
        ...

    @property
    def base_url(self) -> str | None:
        """The URL under which relative pictures lie."""
        ...

    def load(self, split: str) -> Iterable[object]:
        """The rows of "train", "validation" or "test"."""
        ...


@dataclass(frozen=True)
class OwnSource:
    """The user's `load(split)` function; it may also name `seed` (the run's) and `params` (data.params)."""

    function: Callable[..., object]
    name: str
    root: Path | None
    base_url: str | None
    seed: int = 0
    params: Mapping[str, object] = field(default_factory=dict[str, object])

    def load(self, split: str) -> Iterator[object]:
        """The rows of one split.

        Raises:
            ParamsError: the function gives nothing that can be looped over, or cannot take data.params.
        """
        accepted = inspect.signature(self.function).parameters
        if self.params and "params" not in accepted:
            raise ParamsError(
                f"data.params: {self.name} has no argument `params` to take {sorted(self.params)}"
            )
        known = {"seed": self.seed, "params": self.params}
        rows = self.function(split, **{k: v for k, v in known.items() if k in accepted})
        if not isinstance(rows, Iterable):
            raise ParamsError(
                f"data.source: {self.name}({split!r}) must return an iterable of rows, "
                f"got {type(rows).__name__}"
            )
        return iter(cast("Iterable[object]", rows))


def counts(params: DataParams) -> dict[str, int | None]:
    """How many rows of each split are asked for; None: all."""
    return {"train": params.num_train, "validation": params.num_validation, "test": params.num_test}


def load_source(params: DataParams, images: ImagesParams, *, seed: int, work_dir: Path) -> Source:
    """Open the dataset that data.source names.

    `work_dir` takes what an s3:// path needs downloaded.

    Raises:
        ParamsError: the source, or what it needs, is wrong or missing; the message names the key.
    """
    if params.params and ":" not in params.source:
        raise ParamsError(
            f"data.params: source {params.source} takes none, got {sorted(params.params)}"
        )
    if params.source == "synthetic":
        wanted = counts(params)
        missing = [split for split, count in wanted.items() if count is None]
        if missing:
            raise ParamsError(
                f"data.num_{missing[0]}: a synthetic source is endless, set a number of rows, got null"
            )
        base_url = params.base_url or (f"http://{images.serve_host}" if images.serve_host else None)
        drawn = {split: count for split, count in wanted.items() if count is not None}
        return SyntheticSource(params.synthetic, seed, drawn, base_url=base_url)
    if params.source == "geo3k":
        return open_geo3k(params, images, work_dir)
    if ":" not in params.source:
        raise ParamsError(
            f'data.source must be synthetic, geo3k or "module:attr" of a load(split) function, '
            f"got {params.source!r}"
        )
    root = from_checkout(params.path) if params.path else None
    function = load_object(params.source, "data.source")
    return OwnSource(function, params.source, root, params.base_url, seed, params.params)
