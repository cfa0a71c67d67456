"""problems.jsonl as `Problem` nouns: prompt text with <image> tags becomes messages with pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from polyturn.data.files import read_jsonl
from polyturn.data.quarantine import RowError, SetAside
from polyturn.types import ImageRecord, Json, Message, Problem, Role

IMAGE_TAG = "<image>"


def split_tags(role: Role, text: str, images: Sequence[ImageRecord]) -> Message:
    """Put pictures where the tags stand.

    "<image>Find $x$." with one picture becomes content (picture, "Find $x$.").

    Raises:
        ValueError: the number of tags is not the number of pictures.
    """
    pieces = text.split(IMAGE_TAG)
    if len(pieces) - 1 != len(images):
        raise ValueError(
            f"{len(pieces) - 1} {IMAGE_TAG} tags for {len(images)} pictures in {text[:80]!r}"
        )
    content: list[str | ImageRecord] = [pieces[0]] if pieces[0] else []
    for image, piece in zip(images, pieces[1:], strict=True):
        content.append(image)
        if piece:
            content.append(piece)
    return Message(role, tuple(content))


def read_problems(path: Path, image_dir: Path) -> list[Problem]:
    """Read the problems.jsonl of the `images` or `model` stage.

    `image_dir` is the images stage's out; records point into its png/ folder.

    Raises:
        ValueError: a line is no JSON, lacks a key or has another number of tags than pictures.
    """
    problems: list[Problem] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        try:
            problems.append(_problem(row, image_dir))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number} is no problem of polyturn ({type(error).__name__}: {error}); "
                "rerun the images stage"
            ) from None
    return problems


def _problem(row: Mapping[str, object], image_dir: Path) -> Problem:
    records = [
        _record(cast("Mapping[str, object]", item), image_dir)
        for item in cast("list[object]", row["images"])
    ]
    prompt = row["problem"]
    turns = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else cast("list[dict[str, str]]", prompt)
    )
    messages: list[Message] = []
    for turn in turns:
        count = turn["content"].count(IMAGE_TAG)
        messages.append(split_tags(_role(turn["role"]), turn["content"], records[:count]))
        records = records[count:]
    if records:
        raise ValueError(f"{len(records)} pictures without a tag")
    return Problem(
        id=str(row["id"]),
        split=str(row["split"]),
        messages=tuple(messages),
        answer=str(row["answer"]),
        metadata=cast("dict[str, Json]", row["metadata"]),
    )


def _role(name: str) -> Role:
    if name not in get_args(Role):
        raise ValueError(f"role {name!r} is none of {', '.join(get_args(Role))}")
    return cast("Role", name)


def _record(item: Mapping[str, object], image_dir: Path) -> ImageRecord:
    sha = str(item["sha256"])
    return ImageRecord(
        sha,
        int(str(item["width"])),
        int(str(item["height"])),
        path=image_dir / "png" / f"{sha}.png",
    )


def problem_row(problem: Problem) -> dict[str, object]:
    """The problems.jsonl line of a problem; `read_problems` gives an equal problem back."""
    turns = [
        {
            "role": message.role,
            "content": "".join(p if isinstance(p, str) else IMAGE_TAG for p in message.content),
        }
        for message in problem.messages
    ]
    is_single = len(turns) == 1 and turns[0]["role"] == "user"
    return {
        "id": problem.id,
        "split": problem.split,
        "problem": turns[0]["content"] if is_single else turns,
        "answer": problem.answer,
        "images": [
            {"sha256": i.sha256, "width": i.width, "height": i.height} for i in problem.images
        ],
        "metadata": dict(problem.metadata),
    }


def fit(
    problems: Iterable[Problem],
    count_tokens: Callable[[Problem], int],
    max_prompt_tokens: int,
) -> tuple[list[Problem], list[SetAside]]:
    """Split problems into those whose rendered prompt fits and those that are too long for it.

    `count_tokens` gives the length of a problem's prompt with its image pads expanded; a problem of which it raises
    RowError is set aside too.
    """
    kept: list[Problem] = []
    set_aside: list[SetAside] = []
    for problem in problems:
        try:
            length = count_tokens(problem)
            if length > max_prompt_tokens:
                detail = (
                    f"prompt has {length} tokens, model.max_prompt_tokens is {max_prompt_tokens}"
                )
                raise RowError("prompt_too_long", detail)
        except RowError as error:
            set_aside.append(
                SetAside(problem.id, problem.split, "model", error.reason, error.detail)
            )
            continue
        kept.append(problem)
    return kept, set_aside
