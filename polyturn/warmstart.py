"""Supervised warm start on demonstrations (also the SFT recipe), masked to what the replies train.

A phase ends when its gates are reached (the last reply's loss of kinds of examples), not after a fixed number of
steps: seeds differ threefold in when they learn to read.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch

from polyturn.batching import collate, micro_batches
from polyturn.envs.base import ToolSchema, load_object
from polyturn.envs.demonstration import Demonstration
from polyturn.learner.base import NonFiniteError
from polyturn.learner.scoring import gradient_norm, score_batch
from polyturn.memory import lowered_by
from polyturn.params import PhaseParams, WarmstartParams
from polyturn.policy import vision
from polyturn.policy.logprobs import Scores
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.samples import from_demonstration
from polyturn.seeds import derive
from polyturn.types import Batch, Problem, TrainingSample

logger = logging.getLogger(__name__)

FINAL_LR_FRACTION = 0.03  # what the linear decay after a gate ends at
Examples = Callable[[str, Problem, random.Random], Demonstration]


class WarmstartError(ValueError):
    """The warm start cannot do what params ask for."""


@dataclass(frozen=True)
class StepReport:
    """One supervised step: mean loss per trained token (nats), answer loss per kind (nats per answer)."""

    phase: str
    step: int
    loss: float
    answer_nats: Mapping[str, float]
    grad_norm: float
    lr: float


@dataclass(frozen=True)
class PhaseReport:
    """How a phase ended; `is_gate_reached` is None for a phase without gates."""

    phase: str
    num_steps: int
    is_gate_reached: bool | None
    answer_nats: Mapping[str, float]


def no_tools(problem: Problem) -> Sequence[ToolSchema]:
    """For prompts that show no function schemas."""
    del problem
    return ()


@dataclass(frozen=True)
class ExampleSource:
    """Where examples come from: problems, who demonstrates on them, and the tools that a problem's prompt shows."""

    problems: Sequence[Problem]
    demonstrate: Examples
    tools_of: Callable[[Problem], Sequence[ToolSchema]] = no_tools

    @classmethod
    def load(
        cls,
        params: WarmstartParams,
        problems: Sequence[Problem],
        tools_of: Callable[[Problem], Sequence[ToolSchema]] = no_tools,
    ) -> ExampleSource:
        """Import warmstart.examples; it takes (kind, problem, rng) and, if it wants them, example_params."""
        target = cast(
            "Callable[..., Demonstration]", load_object(params.examples, "warmstart.examples")
        )
        if len(inspect.signature(target).parameters) == 3:
            return cls(problems, target, tools_of)
        return cls(
            problems,
            lambda kind, problem, rng: target(kind, problem, rng, params.example_params),
            tools_of,
        )

    def sample(self, kind: str, rng: random.Random, renderer: Renderer) -> TrainingSample:
        """One example on a problem drawn with replacement."""
        problem = rng.choice(self.problems)
        demonstration = self.demonstrate(kind, problem, rng)
        return from_demonstration(demonstration, renderer, self.tools_of(problem))


def warm_start(
    policy: Policy,
    renderer: Renderer,
    source: ExampleSource,
    params: WarmstartParams,
    *,
    seed: int,
    on_step: Callable[[StepReport], None],
) -> list[PhaseReport]:
    """Train `policy` in place through all phases; every random choice derives from `seed`, phase and step.

    Raises:
        WarmstartError: an example kind is unknown, or problems do not suit it.
        NonFiniteError: loss or gradients are not finite.
    """
    trainer = _Trainer(policy, renderer, params)
    reports: list[PhaseReport] = []
    for phase in params.phases:
        reports.append(
            _run_phase(phase, trainer, source, derive(seed, "warmstart", phase.name), on_step)
        )
        logger.info("warm start phase %s ended after %d steps", phase.name, reports[-1].num_steps)
    trainer.freeze_vision(False)
    return reports


def _run_phase(
    phase: PhaseParams,
    trainer: _Trainer,
    source: ExampleSource,
    seed: int,
    on_step: Callable[[StepReport], None],
) -> PhaseReport:
    gates = _Gates(phase)
    trainer.freeze_vision(phase.freeze_vision)

    def take_step(step: int, scale: float) -> StepReport:
        samples = draw_examples(phase, source, trainer.renderer, derive(seed, step))
        report = trainer.step(samples, _lr(phase, step, scale), phase.name, step)
        gates.add(report.answer_nats)
        on_step(report)
        return report

    step, report = 0, None
    while step < phase.max_steps and not gates.are_reached:
        report = take_step(step, 1.0)
        step += 1
    is_reached = gates.are_reached if phase.gates else None
    if is_reached is False:
        logger.warning("warm start phase %s: gates not reached in %d steps", phase.name, step)
    for later in range(phase.decay_steps):
        report = take_step(step + later, _decay(later, phase.decay_steps))
    return PhaseReport(
        phase.name, step + phase.decay_steps, is_reached, report.answer_nats if report else {}
    )


class _Gates:
    """Watches the losses that end a phase."""

    def __init__(self, phase: PhaseParams) -> None:
        for kind, count in kind_counts(phase.mix, phase.batch_size).items():
            if not count:
                raise WarmstartError(
                    f"warmstart.phases: {phase.name} has no example of {kind} in a batch of {phase.batch_size}; "
                    "raise batch_size or its share of mix"
                )
        self._limits = phase.gates
        self._recent = {kind: deque[float](maxlen=phase.gate_window) for kind in phase.gates}

    def add(self, answer_nats: Mapping[str, float]) -> None:
        """Take a step's losses."""
        for kind, recent in self._recent.items():
            recent.append(answer_nats[kind])

    @property
    def are_reached(self) -> bool:
        """Whether there are gates, and all means over the window are below them."""
        return bool(self._recent) and all(
            len(recent) == recent.maxlen and sum(recent) / len(recent) < self._limits[kind]
            for kind, recent in self._recent.items()
        )


def _lr(phase: PhaseParams, step: int, scale: float) -> float:
    """Learning rate of a phase's step: linear warm-up, then `scale`."""
    return phase.lr * min(1.0, (step + 1) / max(1, phase.warmup_steps)) * scale


def _decay(step: int, num_steps: int) -> float:
    return 1.0 - (1.0 - FINAL_LR_FRACTION) * step / max(1, num_steps)


def draw_examples(
    phase: PhaseParams, source: ExampleSource, renderer: Renderer, seed: int
) -> list[TrainingSample]:
    """One batch of a phase: the shares of its mix."""
    rng = random.Random(seed)
    return [
        source.sample(kind, rng, renderer)
        for kind, count in kind_counts(phase.mix, phase.batch_size).items()
        for _ in range(count)
    ]


def kind_counts(mix: Mapping[str, float], batch_size: int) -> dict[str, int]:
    """Examples per kind: the batch is cut where the running sum of shares, rounded, says.

    >>> kind_counts({"search": 0.4, "guess": 0.6}, 64)
    {'search': 26, 'guess': 38}
    """
    sums = list(accumulate(mix.values()))
    cuts = [0, *(round(batch_size * part / sums[-1]) for part in sums)]
    return {kind: end - start for kind, (start, end) in zip(mix, pairwise(cuts), strict=True)}


class _Trainer:
    """Supervised steps with AdamW on all parameters."""

    def __init__(self, policy: Policy, renderer: Renderer, params: WarmstartParams) -> None:
        self.renderer = renderer
        self._policy = policy
        self._params = params
        self._tower = vision.TowerInTraining(policy, cache_mb=params.vision_cache_mb)
        self._parameters = list(policy.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, betas=params.betas, weight_decay=params.weight_decay, fused=True
        )

    def step(
        self, samples: Sequence[TrainingSample], lr: float, phase: str, step: int
    ) -> StepReport:
        """One optimizer step: the mean over all trained tokens of the batch, in micro-batches."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        num_tokens = max(1, sum(int(sample.loss_mask.sum()) for sample in samples))
        loss, nats = 0.0, _AnswerNats()
        for indices in micro_batches(
            samples,
            self.renderer,
            self._params.micro_batch_tokens,
            patch_cost=self._tower.patch_cost,
        ):
            chosen = [samples[index] for index in indices]
            with lowered_by(
                "training", {"warmstart.micro_batch_tokens": self._params.micro_batch_tokens}
            ):
                scores = self._score(collate(chosen, [0.0] * len(chosen), self.renderer))
                micro_loss = -scores.logprobs.sum() / num_tokens
                micro_loss.backward()
            loss += float(micro_loss.detach())
            nats.add(chosen, scores.logprobs.detach())
        norm = gradient_norm(self._parameters, self._params.grad_clip)
        if not np.isfinite([loss, norm]).all():
            raise NonFiniteError(
                f"warm start phase {phase}, step {step}: loss {loss}, gradient norm {norm}"
            )
        self._optimizer.step()
        return StepReport(phase, step, loss, nats.means(), norm, lr)

    def freeze_vision(self, is_frozen: bool) -> None:
        """Take the vision tower out of training, or back in."""
        self._tower.freeze(is_frozen)

    def _score(self, batch: Batch) -> Scores:
        features = self._tower.features(batch.images)
        return score_batch(self._policy, batch, features, temperature=1.0)


class _AnswerNats:
    """Sums the loss of the last reply's trained tokens per kind of example."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, samples: Sequence[TrainingSample], logprobs: torch.Tensor) -> None:
        """Take a micro-batch; `logprobs` [N] of its trained tokens in reading order."""
        end = 0
        for sample in samples:
            end += int(sample.loss_mask[1:].sum())
            answer = sample.num_answer_tokens
            self._sums[sample.kind] = self._sums.get(sample.kind, 0.0) - float(
                logprobs[end - answer : end].sum()
            )
            self._counts[sample.kind] = self._counts.get(sample.kind, 0) + 1

    def means(self) -> dict[str, float]:
        """Nats per answer, by kind in name order."""
        return {kind: self._sums[kind] / self._counts[kind] for kind in sorted(self._sums)}
