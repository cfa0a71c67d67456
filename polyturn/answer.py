"""Answers a question about a picture as the policy was trained to: whole episodes in its environment, ungraded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn.data.normalise import normalise
from polyturn.envs.base import load_object
from polyturn.episode import Episode, EpisodeSettings
from polyturn.evaluation.evaluate import evaluation_settings
from polyturn.params import Params
from polyturn.policy import model
from polyturn.render import Renderer
from polyturn.reward import extract_answer
from polyturn.sampler.hf import HfSampler
from polyturn.types import ImageRecord, Message, Problem, Trajectory


@dataclass(frozen=True)
class Question:
    """A picture, as the bytes of a file of any format that the images stage reads, and what is asked about it."""

    image: bytes
    text: str


@dataclass(frozen=True)
class Answer:
    """`answer` is "" where none was given; `text` are all replies of the policy, one after the other."""

    answer: str
    text: str
    num_turns: int
    stop_reason: str


class Answerer:
    """A policy with its environment, under the params that it was evaluated with (env.eval_params included).

    Greedy unless `temperature` is given; then equal seeds give equal answers.
    """

    def __init__(self, directory: Path, params: Params) -> None:
        self._params = params
        self._policy = model.load(params.model, directory)
        self._renderer = Renderer(self._policy)
        self._sampler = HfSampler(self._policy, self._renderer, is_vision_frozen=True)

    def answer(
        self, questions: Sequence[Question], *, temperature: float = 0.0, seed: int = 0
    ) -> list[Answer]:
        """Answer all questions together, in order.

        Raises:
            RowError: a picture cannot be read.
        """
        problems = [self._problem(index, question) for index, question in enumerate(questions)]
        return [
            _told(trajectory) for trajectory in asyncio.run(self._play(problems, temperature, seed))
        ]

    def _problem(self, index: int, question: Question) -> Problem:
        found = normalise(question.image, self._params.images)
        record = ImageRecord(found.sha256, found.width, found.height, data=found.png)
        # The reference answer is not known: environments that would tell it have their oracle off in evaluation.
        return Problem(f"question/{index}", "test", (Message("user", (record, question.text)),), "")

    async def _play(
        self, problems: Sequence[Problem], temperature: float, seed: int
    ) -> list[Trajectory]:
        settings = evaluation_settings(self._params)
        shared = EpisodeSettings(
            self._renderer,
            load_object(settings.env.build, "env.build"),
            settings.env,
            settings.rollout,
            seed,
            temperature,
        )
        episodes = [Episode(shared, problem, index, 0) for index, problem in enumerate(problems)]
        try:
            await asyncio.gather(*(episode.start() for episode in episodes))
            while live := [episode for episode in episodes if not episode.is_done]:
                replies = await self._sampler.generate([episode.request() for episode in live])
                for episode, reply in zip(live, replies, strict=True):
                    await episode.advance(reply)
        finally:
            for episode in episodes:
                await episode.close()
        return [episode.finish() for episode in episodes]


def _told(trajectory: Trajectory) -> Answer:
    texts = [turn.reply_text for turn in trajectory.turns]
    found = extract_answer(texts[-1]) if texts else None
    return Answer(found or "", "\n".join(texts), len(texts), str(trajectory.stop_reason))
