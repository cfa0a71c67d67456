"""The texts that the small model's tokenizer is trained on: the problems, the environments' words, answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyturn.envs import zoom
from polyturn.types import Problem

NUM_ANSWERS = 200  # plain integers that the tokenizer sees as answers
ROLES = ("system", "user", "assistant")
FEEDBACK = "calc_score result: {score}. The parsed answer {answer} does not match the reference."


def corpus(problems: Sequence[Problem]) -> Iterator[str]:
    """Texts in a fixed order; equal problems give equal texts."""
    for problem in problems:
        for message in problem.messages:
            yield message.text
        yield zoom.answer(problem.answer)
    for region in zoom.REGIONS:
        yield zoom.tool_call(region)
        yield zoom.not_seen([region])
    yield zoom.READ_QUESTION
    yield zoom.not_seen([])
    yield zoom.not_seen(list(zoom.REGIONS))
    for number in range(NUM_ANSWERS):
        yield zoom.answer(str(number))
        yield f'<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{number}"}}}}</tool_call>'
        yield FEEDBACK.format(score=0, answer=number)
    yield from ROLES
