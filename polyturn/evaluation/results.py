"""What an evaluation found, problem by problem: the rows of artifacts/evaluation/results.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from polyturn.data.files import read_jsonl

RESULTS = "results.jsonl"
SCORE = "policy/sampled"  # what versions are compared and promoted by: POLICY/DECODING

_MAX_REPLY = 600  # characters kept of a reply's end


@dataclass(frozen=True)
class ProblemResult:
    """One problem of the test split and what became of every try at it.

    `correct` maps a score's name (policy/sampled, warmstart/greedy, ...) to right or wrong by try; `replies` to the end
    of the first try's last reply. `kind` is "" where the data has none; `pictures` are hashes, of the prompt.
    """

    id: str
    answer: str
    correct: Mapping[str, Sequence[bool]]
    kind: str = ""
    question: str = ""
    pictures: Sequence[str] = ()
    replies: Mapping[str, str] = field(default_factory=dict[str, str])

    def share(self, score: str = SCORE) -> float:
        """Share of the tries that are right.

        Raises:
            ValueError: there is no such score.
        """
        tries = self.correct.get(score)
        if not tries:
            raise ValueError(
                f"problem {self.id} has no score {score!r}, only {', '.join(self.correct) or 'none'}"
            )
        return sum(tries) / len(tries)


def to_row(result: ProblemResult) -> dict[str, object]:
    """The JSON form; `read` takes it back."""
    return {
        "id": result.id,
        "answer": result.answer,
        "kind": result.kind,
        "question": result.question,
        "pictures": list(result.pictures),
        "correct": {name: list(tries) for name, tries in result.correct.items()},
        "replies": dict(result.replies),
    }


def read(path: Path) -> list[ProblemResult]:
    """Read results.jsonl; rows of versions that wrote less than today's lack what they lack.

    Raises:
        ValueError: a line is damaged or is no result; the message names file and line.
    """
    found: list[ProblemResult] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        try:
            found.append(_result(row))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no result of a problem ({type(error).__name__}: {error})"
            ) from None
    return found


def end_of(reply: str) -> str:
    """What is kept of a reply: its end, where the answer stands.

    >>> end_of("a" * 600 + "b") == "…" + "a" * 598 + "b"
    True
    """
    return reply if len(reply) <= _MAX_REPLY else "…" + reply[1 - _MAX_REPLY :]


def _result(row: Mapping[str, object]) -> ProblemResult:
    correct = cast("Mapping[str, Sequence[bool]]", row["correct"])
    return ProblemResult(
        id=str(row["id"]),
        answer=str(row["answer"]),
        correct={name: tuple(bool(right) for right in tries) for name, tries in correct.items()},
        kind=str(row.get("kind", "")),
        question=str(row.get("question", "")),
        pictures=tuple(cast("Sequence[str]", row.get("pictures", ()))),
        replies=dict(cast("Mapping[str, str]", row.get("replies", {}))),
    )


def scores(blocks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """The summaries of a test set by policy and decoding, under the names that MLflow has for them.

    >>> scores({"policy": {"greedy": {"accuracy": 0.9}}})
    {'test/policy/greedy/accuracy': 0.9}
    """
    return {
        f"test/{policy}/{decoding}/{name}": value
        for policy, by_decoding in blocks.items()
        for decoding, summary in by_decoding.items()
        for name, value in summary.items()
    }
