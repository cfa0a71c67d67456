"""One problem by name: of the data set that was built here, or generated on the spot."""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from polyturn import data, layout
from polyturn.data.embedded import Embedded
from polyturn.data.normalise import normalise
from polyturn.data.problems import split_tags
from polyturn.data.rows import parse_row
from polyturn.data.sources import load_source
from polyturn.params import DataParams, ImagesParams, Params, load
from polyturn.types import ImageRecord, Message, Problem, Role

GENERATED = "generated"


def pick(name: str, params: Params, *, split: str) -> Problem:
    """A problem by its id or its number in the split; "generated" or "generated:7" draws a new one.

    Where no data set is built, or one of another source than the environment's own, a number stands for a generated
    problem. Generated ones come from the `load` function of the environment's module if it has one (sokoban), else from
    the synthetic figures.

    Raises:
        ValueError: there is no such problem.
    """
    built = (directory / "problems.jsonl" for directory in (layout.PROBLEMS, layout.IMAGES))
    path = next((path for path in built if path.exists()), None)
    is_foreign = name.isdigit() and _has_another_source(params)
    if name.startswith(GENERATED) or path is None or is_foreign:
        number = name.removeprefix(GENERATED).removeprefix(":") or "0"
        if number.isdigit():
            return _generated(int(number), params, split)
        why = "" if path else "no data set is built here (make demo), so "
        raise ValueError(f"--problem {name}: {why}it must be a number or {GENERATED}:NUMBER")
    problems = data.read_problems(path, layout.IMAGES)
    if not name.isdigit():
        found = next((problem for problem in problems if problem.id == name), None)
        if found is None:
            example = problems[0].id if problems else "none"
            raise ValueError(f"--problem {name}: {path} has no such id; its first is {example}")
        return found
    problems = [problem for problem in problems if problem.split == split]
    if int(name) >= len(problems):
        raise ValueError(
            f"--problem {name}: split {split} of {path} has {len(problems)} problems, from 0 on"
        )
    return problems[int(name)]


def _generated(index: int, params: Params, split: str) -> Problem:
    chosen = _source(params, split, index + 1)
    with TemporaryDirectory() as directory:
        source = load_source(chosen, params.images, seed=params.seed, work_dir=Path(directory))
        raw = next(itertools.islice(source.load(split), index, None))
    row = parse_row(raw, split=split, index=index, params=chosen, parse_answer=str)
    images = [_record(image, params.images) for image in row.images]
    turns = (("user", row.problem),) if isinstance(row.problem, str) else row.problem
    messages: list[Message] = []
    for role, text in turns:
        count = text.count("<image>")
        messages.append(split_tags(_role(role), text, images[:count]))
        images = images[count:]
    return Problem(row.id, split, tuple(messages), row.answer, row.metadata)


def _source(params: Params, split: str, count: int) -> DataParams:
    """The section `data` for a source that can draw `count` problems of the split."""
    changes: dict[str, object] = {f"num_{split}": count}
    configured = params.data.source
    if module := _own_source(params):
        if configured.partition(":")[0] != module:
            changes |= {"source": f"{module}:load", "params": {}, "path": None}
    elif configured != "synthetic":
        changes |= {"source": "synthetic", "params": {}, "path": None}
    return params.data.model_copy(update=changes)


def _own_source(params: Params) -> str | None:
    """The environment's module, if that brings problems of its own."""
    module = params.env.build.partition(":")[0]
    return module if callable(getattr(import_module(module), "load", None)) else None


def _has_another_source(params: Params) -> bool:
    """Whether the checkout's problems are of another kind than those that the environment brings along."""
    own = _own_source(params)
    return own is not None and load(layout.PARAMS).data.source.partition(":")[0] != own


def _role(name: str) -> Role:
    return "system" if name == "system" else "assistant" if name == "assistant" else "user"


def _record(image: object, limits: ImagesParams) -> ImageRecord:
    assert isinstance(image, Embedded), "generated rows hold their pictures"
    stored = normalise(image.data, limits)
    return ImageRecord.from_png(stored.png, stored.width, stored.height)
