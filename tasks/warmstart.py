"""Stage `warmstart`: supervised training on demonstrations -> artifacts/warmstart."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from polyturn import data, layout
from polyturn.determinism import choose_kernels
from polyturn.envs.base import load_object, prompt_tools
from polyturn.params import Params
from polyturn.policy import model
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.runtime import set_up_torch, training_device
from polyturn.seeds import derive
from polyturn.tracking.series import gathered
from polyturn.types import Problem
from polyturn.warmstart import ExampleSource, StepReport, warm_start
from tasks.context import StageContext, run_stage

_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Train the base model through all phases of the warm start."""
    set_up_torch(ctx.params)
    choose_kernels(ctx.params)
    policy = model.load(ctx.params.model, layout.BASE_MODEL)
    torch.nn.Module.to(policy.model, training_device(ctx.params.learner))
    problems = data.read_problems(layout.PROBLEMS / "problems.jsonl", layout.IMAGES)
    train = [problem for problem in problems if problem.split == "train"]
    phases = ctx.params.warmstart.phases
    num_steps = 0
    with (
        Progress(
            sum(phase.max_steps + phase.decay_steps for phase in phases), "warm start"
        ) as progress,
        gathered(ctx.run) as log_metrics,
    ):

        def on_step(report: StepReport) -> None:
            nonlocal num_steps
            answers = {
                f"warmstart/answer_nats/{kind}": nats for kind, nats in report.answer_nats.items()
            }
            log_metrics(
                {
                    "warmstart/loss": report.loss,
                    "warmstart/grad_norm": report.grad_norm,
                    "warmstart/lr": report.lr,
                    **answers,
                },
                num_steps,
            )
            num_steps += 1
            progress.update(1, phase=report.phase, loss=report.loss, **report.answer_nats)

        reports = warm_start(
            policy,
            Renderer(policy),
            _source(ctx.params, train),
            ctx.params.warmstart,
            seed=derive(ctx.params.seed, "warmstart"),
            on_step=on_step,
        )
    model.save(policy, layout.WARMSTART)
    ctx.run.set_tags({"weights.sha256": model.weights_digest(policy.model)})
    for report in reports:
        gate = {None: "no gate", True: "gate reached", False: "gate NOT reached"}[
            report.is_gate_reached
        ]
        ctx.run.log_metrics({f"warmstart/{report.phase}/num_steps": report.num_steps})
        _log.info("warm start: phase %s took %d steps (%s)", report.phase, report.num_steps, gate)


def _source(params: Params, problems: Sequence[Problem]) -> ExampleSource:
    """Demonstrations under the prompts that rollouts will show, tools included."""
    builder = load_object(params.env.build, "env.build")
    return ExampleSource.load(
        params.warmstart, problems, lambda problem: prompt_tools(builder, params.env, problem)
    )


if __name__ == "__main__":
    run_stage("warmstart", body)
