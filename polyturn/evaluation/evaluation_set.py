"""Which problems an evaluation asks, open or sealed, and the digest by which two evaluations are the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, cast

from polyturn.params import Params
from polyturn.pipeline.code_digest import code_digest
from polyturn.types import Problem

Part = Literal["open", "sealed"]
_GRADER = ("polyturn.reward", "polyturn.grading")  # what turns a reply into right or wrong


def is_sealed(problem_id: str, fraction: float) -> bool:
    """Whether a test problem is of the sealed part: by its id alone, so that it is for every seed and dataset size.

    >>> [is_sealed(f"test/{i:06d}", 0.25) for i in range(6)]
    [False, False, False, False, False, True]
    """
    digest = hashlib.sha256(f"sealed/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def choose(problems: Iterable[Problem], params: Params, part: Part = "open") -> list[Problem]:
    """The test problems of one part, in their order.

    Raises:
        ValueError: there is none; the message names the key.
    """
    test = [problem for problem in problems if problem.split == "test"]
    fraction = params.evaluate.sealed_fraction
    chosen = [problem for problem in test if is_sealed(problem.id, fraction) == (part == "sealed")]
    if chosen:
        return chosen
    if not test:
        raise ValueError(
            "data.num_test: no test problem is left to evaluate on; see artifacts/*/quarantine.jsonl"
        )
    raise ValueError(
        f"evaluate.sealed_fraction is {fraction:g}: none of the {len(test)} test problems is in the {part} part"
    )


def digest(path: Path, params: Params, part: Part = "open") -> str:
    """Digest of the test problems in a problems.jsonl and of everything that decides how a reply is scored."""
    return digest_of(_lines(path, params.evaluate.sealed_fraction, part), _settings(params))


def digest_of(lines: Iterable[str], settings: Mapping[str, object]) -> str:
    """Digest of problems as JSON lines, in order, and of how they are scored."""
    total = hashlib.sha256()
    for line in lines:
        total.update(line.strip().encode() + b"\n")
    total.update(json.dumps(settings, sort_keys=True).encode())
    return total.hexdigest()


def _settings(params: Params) -> dict[str, object]:
    terms = [term.term for term in params.reward.terms]
    return {
        "code": code_digest([*_GRADER, *(_module(path) for path in (*terms, params.env.build))]),
        "evaluate": params.evaluate.model_dump(
            mode="json", include={"temperature", "samples_per_problem"}
        ),
        "env": params.env.model_dump(mode="json"),
        "reward": params.reward.model_dump(mode="json"),
        "rollout": params.rollout.model_dump(
            mode="json",
            include={"max_turns", "max_new_tokens", "max_turn_tokens", "max_context_tokens"},
        ),
    }


def _module(object_path: str) -> str:
    return object_path.partition(":")[0]


def _lines(path: Path, fraction: float, part: Part) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = cast("Mapping[str, object]", json.loads(line))
            is_of_part = is_sealed(str(row.get("id")), fraction) == (part == "sealed")
            if row.get("split") == "test" and is_of_part:
                yield line
