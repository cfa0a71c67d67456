"""Which learner a training run gets."""

from __future__ import annotations

import logging
import re
import warnings

import torch

from polyturn.learner.base import Learner
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import Params
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.world import ONE, World


def open_learner(
    policy: Policy, renderer: Renderer, params: Params, device: torch.device, world: World = ONE
) -> Learner:
    """The learner that params ask for; it may train the policy's own modules, see `Learner.shares_weights`.

    Raises:
        MegatronError: megatron-core, the model and the params do not fit each other.
        LoraError: the adapters do not fit the model.
    """
    learner, loss, temperature = params.learner, params.loss, params.rollout.temperature
    if params.learner.backend == "fsdp":
        return FsdpLearner(
            policy,
            renderer,
            learner,
            loss,
            temperature,
            seed=params.seed,
            world=world,
            device=device,
        )
    _quieten()
    from polyturn.learner.megatron.learner import MegatronLearner  # noqa: PLC0415  (seconds, and optional)

    return MegatronLearner(policy, renderer, learner, loss, temperature, world=world, device=device)


def _quieten() -> None:
    """megatron-core tells at each start of what it does without, and at each step of torch's newer names."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for module in ("megatron", "torch.distributed.c10d_logger", "torch.distributed.checkpoint"):
        warnings.filterwarnings("ignore", module=rf"{re.escape(module)}(\.|$)")
