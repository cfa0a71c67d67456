"""Typed params.yaml: every value of a run, bounded and documented; imports without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError, model_validator

from polyturn.params.data import DataParams, ImagesParams, SyntheticParams
from polyturn.params.env import EnvParams
from polyturn.params.evaluate import EvaluateParams
from polyturn.params.fields import NonNegativeInt, Section
from polyturn.params.learner import LearnerParams, LoraParams
from polyturn.params.loss import LossParams
from polyturn.params.model import ModelParams, SmallModelParams
from polyturn.params.reward import RewardParams, RewardTermParams
from polyturn.params.rollout import RolloutParams
from polyturn.params.sampler import SamplerParams, SglangParams
from polyturn.params.services import DoctorParams, RegistryParams, StorageParams, TrackingParams
from polyturn.params.train import TrainParams
from polyturn.params.warmstart import PhaseParams, WarmstartParams
from polyturn.params_tree import ParamsError, read_tree

__all__ = [
    "DataParams",
    "DoctorParams",
    "EnvParams",
    "EvaluateParams",
    "ImagesParams",
    "LearnerParams",
    "LoraParams",
    "LossParams",
    "ModelParams",
    "Params",
    "ParamsError",
    "PhaseParams",
    "RegistryParams",
    "RewardParams",
    "RewardTermParams",
    "RolloutParams",
    "SamplerParams",
    "Section",
    "SglangParams",
    "SmallModelParams",
    "StorageParams",
    "SyntheticParams",
    "TrackingParams",
    "TrainParams",
    "WarmstartParams",
    "load",
    "parse",
]


class Params(Section):
    """All of params.yaml."""

    seed: NonNegativeInt = 0
    data: DataParams = DataParams()
    images: ImagesParams = ImagesParams()
    model: ModelParams = ModelParams()
    warmstart: WarmstartParams = WarmstartParams()
    env: EnvParams = EnvParams()
    reward: RewardParams = RewardParams()
    rollout: RolloutParams = RolloutParams()
    sampler: SamplerParams = SamplerParams()
    learner: LearnerParams = LearnerParams()
    loss: LossParams = LossParams()
    train: TrainParams = TrainParams()
    evaluate: EvaluateParams = EvaluateParams()
    registry: RegistryParams = RegistryParams()
    tracking: TrackingParams = TrackingParams()
    storage: StorageParams = StorageParams()
    doctor: DoctorParams = DoctorParams()

    @model_validator(mode="after")
    def _enough_prompts(self) -> Params:
        rules, wanted = self.train.dynamic_sampling, self.rollout.prompts_per_step
        per_round = rules.prompts_per_round or wanted
        if rules.max_rounds * per_round < wanted:
            raise ValueError(
                f"train.dynamic_sampling: max_rounds {rules.max_rounds} of prompts_per_round {per_round} cannot "
                f"give the {wanted} groups of rollout.prompts_per_step; raise one of the two"
            )
        return self

    @model_validator(mode="after")
    def _rate_to_the_end(self) -> Params:
        learner = self.learner
        falls_to_zero = learner.schedule != "constant" and learner.min_lr_fraction == 0
        if falls_to_zero and self.train.steps > learner.decay_steps:
            raise ValueError(
                f"the learning rate is 0 from step {learner.decay_steps} on, so that nothing is learnt up to train.steps "
                f"{self.train.steps}; raise learner.decay_steps or learner.min_lr_fraction, or lower train.steps"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        """Training processes of each host; one GPU each."""
        return self.learner.num_processes // self.train.launch.num_nodes

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each host: one for each training process, and those of SGLang servers that are started beside them."""
        servers = self.sampler.sglang
        starts = self.sampler.backend == "sglang" and not servers.urls
        end = servers.gpu_offset + servers.num_servers * servers.tensor_parallel if starts else 0
        return max(self.ranks_per_node, end)

    @model_validator(mode="after")
    def _gang(self) -> Params:
        nodes, ranks = self.train.launch.num_nodes, self.learner.num_processes
        if ranks % nodes:
            raise ValueError(
                f"learner.num_processes is {ranks}, which cannot be spread evenly over train.launch.num_nodes {nodes}; "
                "make it a multiple"
            )
        if nodes > 1 and self.train.launcher == "local":
            raise ValueError(
                f"train.launch.num_nodes is {nodes}, but train.launcher: local starts processes of this host alone; set it "
                "to 1, or the launcher to slurm or kubernetes"
            )
        if nodes > 1 and (not self.train.work_uri or "://" in self.train.work_uri):
            raise ValueError(
                f"train.work_uri must be a path that all {nodes} nodes share, since every rank writes its part of a "
                f"checkpoint, got {self.train.work_uri!r}"
            )
        return self

    @model_validator(mode="after")
    def _gap_to_correct(self) -> Params:
        if (
            self.loss.tis_mode != "none"
            and self.train.updates_per_rollout > 1
            and self.learner.old_logprobs == "sampler"
        ):
            raise ValueError(
                f"loss.tis_mode {self.loss.tis_mode} corrects the gap between the learner's old logprobs and the "
                f"sampler's, but with train.updates_per_rollout {self.train.updates_per_rollout} and "
                "learner.old_logprobs: sampler these are the same; set learner.old_logprobs: learner"
            )
        return self

    @model_validator(mode="after")
    def _overlap(self) -> Params:
        if not self.train.async_steps:
            return self
        has_ratio = self.train.updates_per_rollout > 1 and self.learner.old_logprobs == "sampler"
        if self.loss.tis_mode == "none" and not has_ratio:
            raise ValueError(
                "train.async_steps 1 trains on replies of the policy before, which loss.tis_mode none does not "
                "correct; set loss.tis_mode to token_truncate"
            )
        for key, is_set in (
            ("learner.offload", self.learner.offload),
            ("sampler.sglang.release_memory", self.sampler.sglang.release_memory),
        ):
            if is_set:
                raise ValueError(
                    f"{key}: true makes learner and sampler take turns on the GPU, but with train.async_steps 1 both "
                    "work at once; set one of the two to false or 0"
                )
        if self.train.debug.mode != "off":
            raise ValueError(
                f"train.debug.mode {self.train.debug.mode} runs one half of the loop, so that nothing overlaps; set "
                "train.async_steps to 0"
            )
        return self


def parse(tree: Mapping[str, object], *, origin: str = "params.yaml") -> Params:
    """Validate a parsed params tree.

    Raises:
        ParamsError: one line per wrong key, with its dotted name, the value seen and what is wrong.
    """
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(cast("Mapping[str, object]", item)) for item in error.errors()]
        raise ParamsError("\n".join(f"{origin}: {line}" for line in lines)) from None


def _describe(item: Mapping[str, object]) -> str:
    path = cast("tuple[str | int, ...]", item["loc"])
    key = ".".join(str(part) for part in path) or "(top level)"
    if item["type"] == "extra_forbidden":
        return f"{key} is not a key of polyturn; known here: {', '.join(_siblings(path))}{_namesakes(path)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_type" and isinstance(item["input"], int | float | date):
        message += " (put it in quotes)"  # 695e0514 is a commit to people and a number to YAML
    return f"{key}: {message}, got {json.dumps(item.get('input'), default=str)[:200]}"


def _namesakes(path: Sequence[str | int]) -> str:
    """Keys of that name in other sections: train.lr is learner.lr."""
    found = [
        f"{name}.{path[-1]}"
        for name, field in Params.model_fields.items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, BaseModel)
        and str(path[-1]) in field.annotation.model_fields
    ]
    return f"; did you mean {' or '.join(found)}?" if found and len(path) > 1 else ""


def _siblings(path: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = Params
    for part in path[:-1]:
        field = section.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ["see polyturn/params/"]
        section = annotation
    return sorted(section.model_fields)


def load(path: Path = Path("params.yaml")) -> Params:
    """Read and validate params.yaml.

    Raises:
        ParamsError: see `read_tree` and `parse`.
    """
    return parse(read_tree(path), origin=str(path))
