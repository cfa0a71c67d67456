"""Trajectories as people read them: pictures with the looked-at boxes, replies token by token, tool calls as words."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from tokenizers import Tokenizer

from polyturn.trajectories import TrajectoryEntry, TurnEntry
from polyturn.types import Json

logger = logging.getLogger(__name__)

TEMPLATES = Environment(
    loader=PackageLoader("polyturn"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)

_PAD = "<|image_pad|>"


@dataclass(frozen=True)
class Token:
    """One token of the trained stream; `probability` is the sampler's, None where nothing was sampled."""

    id: int
    text: str
    is_sampled: bool
    probability: float | None
    is_special: bool = False


@dataclass(frozen=True)
class Box:
    """A part of the problem's picture that was looked at, in thousandths of its width and height."""

    turns: str  # numbers of the turns that looked there
    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Step:
    """One turn to show; `tokens` may be empty where the token stream does not line up with the turns."""

    number: int
    text: str
    tokens: Sequence[Token]
    calls: Sequence[str]
    observation: str | None
    observation_tokens: Sequence[Token]
    pictures: Sequence[str]


@dataclass(frozen=True)
class Shown:
    """One trajectory to show."""

    entry: TrajectoryEntry
    verdict: str  # correct | wrong | partial | truncated | failed
    prompt_tokens: Sequence[Token]
    pictures: Sequence[str]  # hashes, of the prompt
    boxes: Sequence[Box]
    steps: Sequence[Step]


class TokenReader:
    """Token ids -> readable text by the tokenizer of a policy directory; without one, ids as they are."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._tokenizer: Tokenizer | None = None
        if tokenizer is not None and tokenizer.exists():
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._known: dict[int, tuple[str, bool]] = {}

    @cached_property
    def _special(self) -> frozenset[int]:
        assert self._tokenizer is not None
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def read(self, token_id: int) -> tuple[str, bool]:
        """Text of one token, and whether it is a special one."""
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, bool]:
        if self._tokenizer is None:
            return f"{token_id} ", False
        if token_id in self._special:
            return self._tokenizer.id_to_token(token_id) or str(token_id), True
        return self._tokenizer.decode([token_id], skip_special_tokens=False), False


def show(entry: TrajectoryEntry, reader: TokenReader) -> Shown:
    """Line the token stream up with the turns."""
    runs = _runs(entry, reader)
    replies = [run for run in runs if run[0].is_sampled]
    aligned = bool(runs) and len(replies) == len(entry["turns"]) and not runs[0][0].is_sampled
    prompt = runs[0] if aligned else []
    observations = [run for run in runs[1:] if not run[0].is_sampled] if aligned else []
    steps: list[Step] = []
    for index, turn in enumerate(entry["turns"]):
        steps.append(
            Step(
                number=index + 1,
                text=turn["text"],
                tokens=replies[index] if aligned else (),
                calls=[describe_call(call) for call in turn["tool_calls"]],
                observation=turn["observation"],
                observation_tokens=observations[index] if index < len(observations) else (),
                pictures=turn["observation_images"],
            )
        )
    return Shown(
        entry, verdict(entry), prompt, _prompt_pictures(entry), _boxes(entry["turns"]), steps
    )


def verdict(entry: TrajectoryEntry) -> str:
    """How it ended, in one word."""
    reward = entry["reward"]
    if reward is None:
        return "failed"
    if reward >= 1:
        return "correct"
    if entry["status"] == "truncated":
        return "truncated"
    return "partial" if reward > 0 else "wrong"


def describe_call(call: Json) -> str:
    """A tool call as a person says it.

    >>> describe_call({"name": "zoom", "arguments": {"region": "northwest", "image": 0}})
    'zoom(region=northwest, image=0)'
    """
    if not isinstance(call, Mapping):
        return json.dumps(call)
    if "error" in call:
        return f"unreadable call: {call['error']}"
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        return str(call.get("name"))
    said = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in arguments.items()]
    return f"{call.get('name')}({', '.join(said)})"


def _runs(entry: TrajectoryEntry, reader: TokenReader) -> list[list[Token]]:
    probabilities = np.exp(np.asarray(entry["logprobs"], dtype=np.float64))
    tokens: list[Token] = []
    pads = 0
    rows = zip(entry["token_ids"], entry["loss_mask"], probabilities, strict=True)
    for token_id, bit, probability in rows:
        text, is_special = reader.read(token_id)
        if text == _PAD:
            pads += 1
            continue
        if pads:
            tokens.append(Token(-1, f"[picture: {pads}]", False, None, True))
            pads = 0
        shown = float(probability) if bit else None
        tokens.append(Token(token_id, text, bool(bit), shown, is_special))
    return [list(run) for _, run in groupby(tokens, key=lambda token: token.is_sampled)]


def _prompt_pictures(entry: TrajectoryEntry) -> list[str]:
    """The hashes of the prompt's pictures: all but those that observations brought."""
    observed = sum(len(turn["observation_images"]) for turn in entry["turns"])
    hashes = [image["sha256"] for image in entry["images"]]
    return hashes[: len(hashes) - observed] if observed else hashes


def _boxes(turns: Sequence[TurnEntry]) -> list[Box]:
    """Where the turns looked: `info.box` [left, top, right, bottom], fractions, as the zoom env reports it."""
    looks: dict[tuple[int, ...], list[str]] = {}
    for number, turn in enumerate(turns, start=1):
        box = turn["info"].get("box")
        is_of_problem = turn["info"].get("image", 0) == 0
        if is_of_problem and isinstance(box, list) and len(box) == 4:
            sides = [side for side in box if isinstance(side, int | float)]
            looks.setdefault(tuple(round(1000 * side) for side in sides), []).append(str(number))
    return [
        Box(" ".join(numbers), left, top, right - left, bottom - top)
        for (left, top, right, bottom), numbers in looks.items()
    ]
