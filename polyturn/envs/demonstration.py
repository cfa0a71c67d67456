"""What the warm start imitates: one demonstrated conversation, with the characters that are trained."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.types import Message


@dataclass(frozen=True)
class Say:
    """One assistant reply, without the end-of-turn token.

    `trained` holds the character spans [start, end) whose tokens are trained, and then the end token is not;
    None trains the whole reply and the end token.
    """

    text: str
    trained: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.trained or ():
            if not end <= start < stop <= len(self.text):
                raise ValueError(
                    f"trained spans must be ordered, not empty and inside the {len(self.text)} characters "
                    f"of the reply, got {self.trained}"
                )
            end = stop


@dataclass(frozen=True)
class Demonstration:
    """Prompt and turns of one example; Say (reply) and Message (observation) alternate, Say first and last.

    `kind` is the name under which warmstart.phases[].mix asks for the example.
    """

    prompt: tuple[Message, ...]
    turns: tuple[Say | Message, ...]
    kind: str

    def __post_init__(self) -> None:
        expected = [Say if index % 2 == 0 else Message for index in range(len(self.turns))]
        if len(self.turns) % 2 == 0 or not all(map(isinstance, self.turns, expected)):
            raise ValueError(
                "turns of a demonstration must alternate Say, Message, ..., Say, got "
                f"{[type(turn).__name__ for turn in self.turns]}"
            )
