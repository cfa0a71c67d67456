"""The training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from polyturn import layout
from polyturn.params.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    ObjectPath,
    PositiveFloat,
    PositiveInt,
    Section,
)
from polyturn.params.launch import Launcher, LaunchParams


class DynamicSamplingParams(Section):
    """Which groups are trained on, and how many are sampled to find them (DAPO, arXiv:2503.14476, section 3.2)."""

    filters: tuple[ObjectPath, ...] = ()  # (group) -> bool; refused by one: not trained on
    prompts_per_round: PositiveInt | None = None  # sampled at once; None: rollout.prompts_per_step
    max_rounds: PositiveInt = 1  # of sampling in a step, which then trains on what there is


class StopParams(Section):
    """When training ends before train.steps, with the best policy so far; None switches a rule off."""

    plateau_evals: PositiveInt | None = None  # validation scores in a row without a better one
    plateau_min_gain: NonNegativeFloat = 0.0  # of the interval's lower bound, to count as better
    collapse_fraction: Fraction | None = None  # of the best mean reward that there was
    collapse_window: PositiveInt = 10  # steps behind a mean reward
    max_logprob_gap: PositiveFloat | None = None  # mean |sampler - learner| logprob, nats a token
    gap_steps: PositiveInt = 3  # in a row above max_logprob_gap
    max_gpu_hours: PositiveFloat | None = None  # wall time x processes, resumed parts included


class DebugParams(Section):
    """Looking at one half of the loop alone; a run with any mode but off is labelled."""

    mode: Literal["off", "rollout_only", "train_only"] = "off"
    rollouts: str = ""  # train_only: the directory of step files that is trained on
    dump_step: NonNegativeInt | None = None  # step whose training batch is written out

    @model_validator(mode="after")
    def _rollouts(self) -> DebugParams:
        if (self.mode == "train_only") != bool(self.rollouts):
            raise ValueError(
                "rollouts names the directory of step files that mode: train_only reads, and is meaningless "
                f"without, got mode {self.mode!r}, rollouts {self.rollouts!r}"
            )
        if self.rollouts and Path(self.rollouts) == layout.TRAJECTORIES:
            raise ValueError(
                f"rollouts {self.rollouts} is an output of train, which DVC removes before train starts; copy it "
                "to another directory"
            )
        return self


class TrainParams(Section):
    """The training loop."""

    steps: PositiveInt = 40  # rollout batches
    updates_per_rollout: PositiveInt = 2
    # 1: a step's batch is sampled while the learner trains on the one before, by a policy that is one update behind;
    # 0: by the policy that it trains
    async_steps: Literal[0, 1] = 0
    eval_every: PositiveInt = 20  # steps between scores on the validation split
    eval_batch_size: PositiveInt = 128  # trajectories of a score sampled together
    eval_bootstrap_samples: PositiveInt = 2000  # behind a score's interval
    checkpoint_every: PositiveInt = 20
    keep_checkpoints: PositiveInt = 2  # of the newest; older ones are removed
    # Of the published policy's files; null: as the weights are trained.
    export_dtype: Literal["float32", "bfloat16"] | None = None
    resume: str = (
        "auto"  # auto: continue an equal key; never: start anew; RUN_ID: continue that run
    )
    # Where checkpoints in progress live: a path (on a shared disk; relative to the main checkout) or s3://BUCKET/PREFIX;
    # empty: .polyturn/work.
    work_uri: str = ""
    lease_s: PositiveFloat = 60.0  # silence after which a run on s3:// counts as dead
    launcher: Launcher = "local"  # slurm, kubernetes: rendered by `polyturn launch --dry-run`
    launch: LaunchParams = LaunchParams()
    warn_logprob_gap: PositiveFloat = (
        0.05  # mean |sampler - learner| logprob above which a step warns and counts an alarm
    )
    max_logprob_gap: PositiveFloat = (
        0.5  # mean |sampler - learner| logprob above which the run fails
    )
    deterministic: bool = False  # on a GPU: only kernels that give equal bytes, or an error
    dynamic_sampling: DynamicSamplingParams = DynamicSamplingParams()
    stop: StopParams = StopParams()
    debug: DebugParams = DebugParams()

    @model_validator(mode="after")
    def _gap_rule(self) -> TrainParams:
        limit = self.stop.max_logprob_gap
        if limit is not None and limit >= self.max_logprob_gap:
            raise ValueError(
                f"stop.max_logprob_gap {limit} never ends a run, since one fails above max_logprob_gap "
                f"{self.max_logprob_gap}; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _dumped_step(self) -> TrainParams:
        step = self.debug.dump_step
        if step is not None and step >= self.steps:
            raise ValueError(
                f"debug.dump_step {step} is no step of a run of {self.steps}, which are 0 to {self.steps - 1}; "
                "lower it or raise steps"
            )
        return self
