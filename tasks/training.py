"""What each process of a training run does: put the parts together and run the loop; rank 0 leaves the outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from polyturn import data, grpo, layout
from polyturn.determinism import choose_kernels
from polyturn.grpo import TrainingOutcome
from polyturn.params import Params
from polyturn.pictures import Pictures
from polyturn.policy import model
from polyturn.policy.model import DTYPES, Policy
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.runtime import set_up_torch, training_device
from polyturn.tracking.gallery import Gallery
from polyturn.tracking.run import Run
from polyturn.training import stop_request
from polyturn.training.candidates import Candidates, version_path
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.debug import NoSampler
from polyturn.training.journal import Journal
from polyturn.training.metrics import curve_csv
from polyturn.training.parts import Parts
from polyturn.training.recorder import PICTURES, TRAJECTORIES, MetricsSink, Recorder
from polyturn.training.run_state import Best
from polyturn.training.stop_rules import Stopped
from polyturn.trajectories import TrajectoryEntry
from polyturn.types import Problem
from polyturn.world import ONE, World
from tasks.context import write_json
from tasks.learners import open_learner
from tasks.samplers import SamplerPlace, open_sampler

CURVE = "train_curve.csv"
CHECKPOINTS = "checkpoints"
JOURNAL = "journal.jsonl"
CANDIDATES = "candidates"
RESUMED = (CANDIDATES, TRAJECTORIES)  # what a checkpoint needs beside itself
_OUTCOME = "outcome.json"


def train(params: Params, work: Path, sink: MetricsSink, world: World = ONE) -> None:
    """Train in the work directory, from its newest checkpoint if params.train.resume allows it (collective)."""
    set_up_torch(params)
    choose_kernels(params)
    (work / _OUTCOME).unlink(missing_ok=True)
    with Progress(params.train.steps, "train", is_shown=world.is_main) as progress:
        journal = Journal(work / JOURNAL) if world.is_main else Journal(None)
        recorder = Recorder(
            work,
            sink,
            progress,
            journal=journal,
            is_main=world.is_main,
            on_rollout=_audience(sink, params, work),
        )
        parts = _parts(params, recorder, work, world)
        with parts.checkpoints, closing(parts.sampler):
            is_resumed = params.train.resume != "never"
            outcome = asyncio.run(grpo.train(parts, params, resume=is_resumed))
    if world.is_main:
        (work / CURVE).write_text(curve_csv(recorder.history))
        write_json(work / _OUTCOME, asdict(outcome))


def _audience(
    sink: MetricsSink, params: Params, work: Path
) -> Callable[[Sequence[TrajectoryEntry]], None]:
    """Who sees a step's trajectories: a few become traces of the MLflow run, where there is one."""
    if not isinstance(sink, Run):
        return lambda _: None
    pictures = Pictures([trajectories_in(work) / PICTURES, layout.IMAGES / PICTURES])
    return Gallery(sink, params.tracking.traces_per_step, pictures).show


def outcome_in(work: Path) -> TrainingOutcome:
    """What `train` left in the work directory."""
    content = json.loads((work / _OUTCOME).read_text())
    stopped = content["stopped"]
    return TrainingOutcome(Best(**content["best"]), Stopped(**stopped) if stopped else None)


def published_in(work: Path, best: Best) -> Path:
    """The directory of the best policy."""
    return version_path(work / CANDIDATES, best.version)


def trajectories_in(work: Path) -> Path:
    """The directory of step files and pictures."""
    return work / TRAJECTORIES


def _parts(params: Params, recorder: Recorder, work: Path, world: World) -> Parts:
    policy = model.load(params.model, layout.WARMSTART)
    renderer = Renderer(policy)
    problems = data.read_problems(layout.PROBLEMS / "problems.jsonl", layout.IMAGES)
    _check_problems(params, policy, problems)
    device = training_device(params.learner)
    learner = open_learner(policy, renderer, params, device, world)
    # Sharded modules cannot generate, as ranks call them unequally often, and Megatron's not at all: the sampler gets
    # plain ones of its own.
    plain = policy if learner.shares_weights else model.load(params.model, layout.WARMSTART)
    if params.sampler.backend == "hf":  # servers have weights of their own
        torch.nn.Module.to(plain.model, device)
    dtype = params.train.export_dtype
    samples_nothing = params.train.debug.mode == "train_only"
    place = SamplerPlace(layout.WARMSTART, work / "sampler", params.learner.freeze_vision)
    return Parts(
        sampler=NoSampler() if samples_nothing else open_sampler(plain, params, place, world),
        learner=learner,
        renderer=renderer,
        train=[problem for problem in problems if problem.split == "train"],
        validation=[problem for problem in problems if problem.split == "validation"],
        recorder=recorder,
        checkpoints=CheckpointWriter(
            work / CHECKPOINTS, keep=params.train.keep_checkpoints, world=world
        ),
        candidates=Candidates(plain, work / CANDIDATES, world, DTYPES[dtype] if dtype else None),
        world=world,
        stop_request=partial(stop_request.reason, work),
    )


def _check_problems(params: Params, policy: Policy, problems: Sequence[Problem]) -> None:
    if not any(problem.split == "validation" for problem in problems):
        raise ValueError(
            "data.num_validation: no validation problem is left to choose the best policy by; raise it, or see "
            "the reasons in artifacts/*/quarantine.jsonl"
        )
    limit = policy.model.config.text_config.max_position_embeddings
    if params.rollout.max_context_tokens > limit:
        raise ValueError(
            f"rollout.max_context_tokens is {params.rollout.max_context_tokens}, but the model has {limit} "
            "positions; lower it"
        )
